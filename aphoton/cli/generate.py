"""``aphoton generate``."""

import asyncio
import json
import sys
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from aphoton import Completion, Engine, InvalidRequest, SamplingParams, TokenLogprob
from aphoton.checks import build
from aphoton.cli.engine import engine_options, open_engine
from aphoton.cli.options import options
from aphoton.cli.terminal import check_output, err, say, show

__all__ = ["MODEL_HELP", "NOT_TYPED", "generate"]

MODEL_HELP = "smollm2, a folder, a .gguf file, a hub id, or random:tiny and other random shapes."
NOT_TYPED = ("json_schema", "logit_bias", "processor", "priority", "use_prefix_cache")
"""Parameters that are no text on a command line, or mean nothing to one request alone."""


@options(SamplingParams, "sampling", panel="Sampling", leave_out=NOT_TYPED)
@engine_options("seed", "max_rows")
def generate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    json_schema: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A file: the output is JSON of this schema.", rich_help_panel="Sampling"
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say on stderr how fast it was.")] = False,
    *,
    sampling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Continue a prompt. The text goes to stdout as it comes."""
    check_output()
    text = _read_input() if prompt == "-" else prompt
    if json_schema is not None:
        sampling["json_schema"] = _schema(json_schema)
    asyncio.run(_generate(model, text, build(SamplingParams, sampling), settings, stats))


def _read_input() -> str:
    if sys.stdin is None:
        raise InvalidRequest("prompt", "standard input is closed")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", f"standard input is not text: {error}") from None


def _schema(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("json_schema", f"{path} is not JSON: {error}") from None


async def _generate(model: str, prompt: str, params: SamplingParams, settings: dict[str, Any], stats: bool) -> None:
    # One request: it needs no more room than its outputs do.
    async with aclosing(await open_engine(model, {"max_rows": params.n, **settings})) as engine:
        stream = engine.stream(prompt, params)
        if params.n == 1:
            async for piece in stream:
                show(piece.text)
            show("\n")
        done = await stream.completion()
        if params.n > 1:  # they come at the same time, and are read one after the other
            for output in done.outputs:
                say(f"output {output.index}, ended by {output.finish_reason}:")
                show(f"{output.text}\n")
        if params.prompt_logprobs is not None:
            await _show_logprobs(engine, "the prompt's log-probabilities", done.prompt_logprobs)
        if params.logprobs is not None:
            for output in done.outputs:
                title = "log-probabilities" if params.n == 1 else f"log-probabilities of output {output.index}"
                await _show_logprobs(engine, title, output.logprobs)
        if stats:
            _show_stats(done)


async def _show_logprobs(engine: Engine, title: str, entries: Iterable[TokenLogprob | None] | None) -> None:
    table = Table("token", "logprob", "likeliest", title=title)
    for entry in entries or ():
        if entry is None:  # a prompt's first token, which nothing comes before
            continue
        others = [f"{await engine.detokenize([token])!r} {value:.3f}" for token, value in entry.top]
        table.add_row(repr(await engine.detokenize([entry.token_id])), f"{entry.logprob:.3f}", ", ".join(others))
    err.print(table)


def _show_stats(done: Completion) -> None:
    many, timings = done.usage.completion_tokens, done.timings
    line = f"{done.usage.prompt_tokens} prompt tokens, {many} new in {timings.total:.2f} s"
    if timings.ttft is not None:
        line += f", the first after {timings.ttft * 1e3:.0f} ms"
    if timings.itl:
        line += f", then {1 / timings.itl:.1f} tok/s" + (" each" if len(done.outputs) > 1 else "")
    say(f"{line}; ended by {done.finish_reason}")
