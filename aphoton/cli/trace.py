"""``aphoton trace``."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from aphoton import InvalidRequest, SimCosts, SimModel
from aphoton.checks import check_float
from aphoton.cli.engine import cost_options, costs_of, engine_options, open_engine
from aphoton.cli.generate import MODEL_HELP
from aphoton.cli.lists import integers
from aphoton.cli.place import check_place
from aphoton.cli.plot import draw, load_matplotlib
from aphoton.cli.terminal import say
from aphoton.cli.workload import Workload
from aphoton.observe import Recording, trace_events

__all__ = ["trace"]

LONGEST_WINDOW = 1e6
"""Milliseconds."""


@cost_options
@engine_options("pipeline_depth", "seed", "max_rows")
def trace(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default="smollm2")] = None,
    out: Annotated[Path, typer.Option(help="The trace: open it in Perfetto or chrome://tracing.")] = Path("trace.json"),
    png: Annotated[Path | None, typer.Option(help="A picture of the last ticks, too.")] = None,
    window: Annotated[float | None, typer.Option(help="Milliseconds in the picture.", show_default="six steps")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Streams at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Of each request.")] = 64,
    stream: Annotated[bool, typer.Option(help="Consume token by token, or await completions.")] = True,
    depth: Annotated[str, typer.Option(help="Pipeline depth, or 1,2 to compare.")] = "2",
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    *,
    settings: dict[str, Any],
    costs: dict[str, float],
) -> None:
    """Run requests, and write what the host and the device did in every tick."""
    sim = settings.get("device") == "sim"
    sim_costs = costs_of(costs, model, sim=sim)
    depths = integers("depth", depth, high=2)
    workload = Workload(prompt_tokens=prompt_tokens, output_tokens=output_tokens, stream=stream, seed=seed)
    # What would fail at the end fails now.
    check_place("out", out)
    check_place("png", png)
    if png is not None:
        if png.resolve() == out.resolve():
            raise InvalidRequest("png", f"must be another file than the trace's, {out}")
        load_matplotlib()
    if window is not None:
        check_float("window", window, 0.01, LONGEST_WINDOW)
    name = model or ("sim" if sim else "smollm2")
    recordings: dict[str, Recording] = {}
    for one in depths:
        label, recording = asyncio.run(
            _record(name, {**settings, "pipeline_depth": one, "max_rows": concurrency}, sim_costs, workload)
        )
        recordings[label] = recording
        say(f"{label}: {len(recording.device)} steps, the device idle {recording.idle_share:.2%} of its time")
    out.write_text(json.dumps(trace_events(recordings)), encoding="utf-8")
    typer.echo(out)
    if png is not None:
        draw(recordings, png, window=None if window is None else window / 1e3)
        typer.echo(png)


async def _record(
    model: str, settings: dict[str, Any], costs: SimCosts | None, workload: Workload
) -> tuple[str, Recording]:
    """What to call the engine, and its ticks in one round after a short one to warm up."""
    concurrency = settings["max_rows"]
    async with aclosing(await open_engine(model if costs is None else SimModel(costs=costs), settings)) as engine:
        await msgspec.structs.replace(workload, output_tokens=min(workload.output_tokens, 8)).run(engine, concurrency)
        recording = (await workload.run(engine, concurrency, counts=True)).recording
        limits = engine.limits
    parts = (model, limits.dtype, f"{limits.kernels} kernels", f"{concurrency} streams")
    return ", ".join(part for part in (*parts, f"depth {engine.config.pipeline_depth}") if part), recording
