"""``aphoton bench``."""

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from aphoton import EngineConfig
from aphoton.checks import check_int
from aphoton.cli.engine import cost_options, costs_of, engine_options
from aphoton.cli.generate import MODEL_HELP
from aphoton.cli.lists import choices, integers
from aphoton.cli.mode import ONE, find_mode, refuse
from aphoton.cli.place import check_place
from aphoton.cli.plan import Plan
from aphoton.cli.terminal import out, say
from aphoton.cli.workload import Workload
from aphoton.config import DtypeName

__all__ = ["bench"]


@cost_options
@engine_options("dtype", "pipeline_depth", "seed")
def bench(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default="smollm2")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Streams at once, e.g. 1,8,32.",
            show_default=(
                "1,8,32; 8 with --heartbeat, --turns or --memory; --max-rows with --soak; "
                "32 with --shared-prefix or --constrained"
            ),
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of each request.",
            show_default="128; 32 with --memory; up to 1024 with --soak; 200 more than --shared-prefix",
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of each request.", show_default="128; 16 with --memory; up to 256 with --soak"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of a round.", show_default="one per stream; 2000 with --memory"),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="With which all prompts begin; with the prefix cache and without."),
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option(
            min=2, help="Conversations: prompts that go on; with the prefix cache and without. TTFT: later turns'."
        ),
    ] = None,
    constrained: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Of the requests are JSON of a schema: one or several, e.g. 0,25,100."),
    ] = None,
    long_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Instead of speed: prompts of so many tokens arrive beside the streams, in chunks and whole.",
        ),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Consume token by token, or await completions.")] = True,
    dtype: Annotated[str, typer.Option(help="One or several to compare, e.g. float32,bfloat16.")] = "auto",
    depth: Annotated[
        str | None, typer.Option(help="Pipeline depth, or 1,2 to compare.", show_default="2; 1,2 on sim")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds of everything, in turns; medians are shown.", show_default="3; 1 on sim, which repeats"
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Short rounds before, which do not count.", min=0)] = 1,
    heartbeat: Annotated[bool, typer.Option("--heartbeat", help="A 1 ms task on the same loop: its gaps.")] = False,
    against: Annotated[
        Literal["transformers"] | None, typer.Option(help="The same work there, in the same run and dtypes.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Instead of speed: resident memory over many requests.")
    ] = False,
    wakeup: Annotated[
        bool, typer.Option("--wakeup", help="Instead of speed: ways to await a CUDA event, compared.")
    ] = False,
    soak: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Instead of speed: requests of all kinds, some given up, near the engine's capacity for so long.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file, too.")] = None,
    *,
    settings: dict[str, Any],
    costs: dict[str, float],
) -> None:
    """Measure throughput, latencies, and where the time of a step goes."""
    check_place("json", json)
    sim = settings.get("device") == "sim"
    asked: dict[str, object] = {
        "sim": sim,
        "shared_prefix": shared_prefix,
        "turns": turns,
        "constrained": constrained,
        "long_prompts": long_prompts,
        "heartbeat": heartbeat,
        "against": against,
        "memory": memory,
        "wakeup": wakeup,
        "soak": soak,
        "requests": requests,
        "rounds": rounds,
        "no_stream": not stream,
        "dtype": dtype != "auto",
        "kernels": settings.get("kernels"),
        "prefix_cache": "prefix_cache" in settings,
    }
    mode = find_mode(asked)
    streams = concurrency or mode.concurrency or str(settings.get("max_rows", EngineConfig().max_rows))
    plan = Plan(
        model=model or ("sim" if sim else "smollm2"),
        settings=settings,
        costs=costs_of(costs, model, sim=sim),
        dtypes=choices("dtype", dtype, get_args(DtypeName)),
        depths=integers("depth", depth or ("1,2" if sim and not soak else "2"), high=2),
        concurrency=integers("concurrency", streams, high=4096),
        rounds=rounds or (1 if sim else 3),
        warmup=warmup,
        heartbeat=heartbeat,
        against=against,
        workload=Workload(
            prompt_tokens=prompt_tokens or (shared_prefix + 200 if shared_prefix else mode.prompt_tokens),
            output_tokens=output_tokens or mode.output_tokens,
            requests=requests or mode.requests,
            stream=stream,
            seed=seed,
            shared_prefix=shared_prefix or 0,
            turns=turns or 1,
        ),
        constrained=[0] if constrained is None else integers("constrained", constrained, low=0, high=100),
        soak=soak,
        long_prompts=long_prompts,
    )
    refuse(asked | {name: len(getattr(plan, name)) > 1 for name in ONE})
    if long_prompts:
        check_int("output_tokens", plan.workload.output_tokens, 2)  # there is nothing between fewer
    report = asyncio.run(mode.run(plan))
    report.show(out)
    if json is not None:
        json.write_bytes(report.json())
    if report.soak is not None and (problems := report.soak.problems()):
        for problem in problems:
            say(f"error: {problem}")
        raise typer.Exit(1)
