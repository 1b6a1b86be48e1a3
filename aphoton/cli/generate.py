"""``aphoton generate``."""

import asyncio
import sys
from contextlib import aclosing
from typing import Annotated, Any

import typer
from rich.table import Table

from aphoton import Completion, Engine, SamplingParams
from aphoton.checks import build
from aphoton.cli.engine import engine_options, open_engine
from aphoton.cli.options import options
from aphoton.cli.terminal import err, say, show

__all__ = ["MODEL_HELP", "generate"]

MODEL_HELP = "smollm2, a folder, a .gguf file, a hub id, or random:tiny and other random shapes."


@options(SamplingParams, "sampling", panel="Sampling")
@engine_options("seed", "max_rows")
def generate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    stats: Annotated[bool, typer.Option("--stats", help="Say on stderr how fast it was.")] = False,
    *,
    sampling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Continue a prompt. The text goes to stdout as it comes."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    asyncio.run(_generate(model, text, build(SamplingParams, sampling), settings, stats))


async def _generate(model: str, prompt: str, params: SamplingParams, settings: dict[str, Any], stats: bool) -> None:
    # One request: room for one row is all it needs.
    async with aclosing(await open_engine(model, {"max_rows": 1, **settings})) as engine:
        stream = engine.stream(prompt, params)
        async for piece in stream:
            show(piece.text)
        show("\n")
        done = await stream.completion()
        if params.logprobs is not None:
            await _show_logprobs(engine, done)
        if stats:
            _show_stats(done)


async def _show_logprobs(engine: Engine, done: Completion) -> None:
    table = Table("token", "logprob", "likeliest", title="log-probabilities")
    for entry in done.logprobs or ():
        others = [f"{await engine.detokenize([token])!r} {value:.3f}" for token, value in entry.top]
        table.add_row(repr(await engine.detokenize([entry.token_id])), f"{entry.logprob:.3f}", ", ".join(others))
    err.print(table)


def _show_stats(done: Completion) -> None:
    many, timings = done.usage.completion_tokens, done.timings
    line = f"{done.usage.prompt_tokens} prompt tokens, {many} new in {timings.total:.2f} s"
    if timings.ttft is not None:
        line += f", the first after {timings.ttft * 1e3:.0f} ms"
    if timings.itl:
        line += f", then {1 / timings.itl:.1f} tok/s"
    say(f"{line}; ended by {done.finish_reason}")
