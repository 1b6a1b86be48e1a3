"""``aphoton bench``."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
import typer

from aphoton import Engine, EngineConfig, InvalidRequest, SimCosts, SimModel
from aphoton.checks import check_int
from aphoton.cli.bound import Bound, Rates, StepWork
from aphoton.cli.comparison import PeerFigures, compare
from aphoton.cli.costmodel import measure_cost_model
from aphoton.cli.engine import cost_options, costs_of, engine_options, open_engine
from aphoton.cli.figures import Figures
from aphoton.cli.generate import MODEL_HELP
from aphoton.cli.heartbeat import Heartbeat, beside, idle_heartbeat
from aphoton.cli.interruption import ANSWER, measure_interruptions
from aphoton.cli.lists import choices, integers
from aphoton.cli.machine import Machine
from aphoton.cli.memory import measure_memory
from aphoton.cli.place import check_place
from aphoton.cli.report import Report
from aphoton.cli.soak import measure_soak
from aphoton.cli.terminal import out, say
from aphoton.cli.wakeup import measure_wakeups
from aphoton.cli.workload import Round, Workload
from aphoton.config import DtypeName

if TYPE_CHECKING:  # these bring torch
    from aphoton.cli.peer import TransformersPeer
    from aphoton.models import Checkpoint

__all__ = ["bench"]

WARMUP_TOKENS = 16


@cost_options
@engine_options("dtype", "pipeline_depth", "seed")
def bench(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default="smollm2")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Streams at once, e.g. 1,8,32.",
            show_default=(
                "1,8,32; 8 with --heartbeat or --memory; --max-rows with --soak; "
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
    streams = (
        "32"
        if shared_prefix or constrained
        else "16"
        if long_prompts
        else "8"
        if heartbeat or memory
        else str(settings.get("max_rows", EngineConfig().max_rows))
        if soak
        else "1,8,32"
    )
    prompt_default = shared_prefix + 200 if shared_prefix else 32 if memory else 1024 if soak else 128
    plan = Plan(
        model=model or ("sim" if sim else "smollm2"),
        settings=settings,
        costs=costs_of(costs, model, sim=sim),
        dtypes=choices("dtype", dtype, get_args(DtypeName)),
        depths=integers("depth", depth or ("1,2" if sim and not soak else "2"), high=2),
        concurrency=integers("concurrency", concurrency or streams, high=4096),
        rounds=rounds or (1 if sim else 3),
        warmup=warmup,
        heartbeat=heartbeat,
        against=against,
        workload=Workload(
            prompt_tokens=prompt_tokens or prompt_default,
            output_tokens=output_tokens or (16 if memory else 256 if soak else 128),
            requests=requests or (2000 if memory else None),
            stream=stream,
            seed=seed,
            shared_prefix=shared_prefix or 0,
        ),
        constrained=[0] if constrained is None else integers("constrained", constrained, low=0, high=100),
    )
    if against or memory or wakeup or soak:
        _refuse("goes with nothing but speed", shared_prefix=shared_prefix, constrained=constrained)
    if long_prompts:
        _refuse(
            "does not go with --long-prompts, which compares budgets of a step on one engine each",
            against=against,
            heartbeat=heartbeat,
            memory=memory,
            wakeup=wakeup,
            soak=soak,
            requests=requests,
            rounds=rounds,
            stream=not stream,
            shared_prefix=shared_prefix,
            constrained=constrained,
            dtype=len(plan.dtypes) > 1,
            depth=len(plan.depths) > 1,
            concurrency=len(plan.concurrency) > 1,
        )
        check_int("output_tokens", plan.workload.output_tokens, 2)  # there is nothing between fewer
    if shared_prefix:
        _refuse("is what --shared-prefix compares", prefix_cache=settings.get("prefix_cache") is not None)
    if sim:
        _refuse(
            "means nothing on the simulated device",
            against=against,
            heartbeat=heartbeat,
            memory=memory,
            long_prompts=long_prompts,
            dtype=dtype != "auto",
            kernels=settings.get("kernels"),
        )
    if wakeup:
        _refuse("does not go with --wakeup, which runs no engine", against=against, heartbeat=heartbeat, memory=memory)
    if memory:
        _refuse(
            "does not go with --memory, which runs one engine at one concurrency",
            against=against,
            heartbeat=heartbeat,
            dtype=len(plan.dtypes) > 1,
            depth=len(plan.depths) > 1,
            concurrency=len(plan.concurrency) > 1,
        )
    if soak:
        _refuse(
            "does not go with --soak, which sends requests of all kinds to one engine",
            against=against,
            heartbeat=heartbeat,
            memory=memory,
            wakeup=wakeup,
            requests=requests,
            stream=not stream,
            dtype=len(plan.dtypes) > 1,
            depth=len(plan.depths) > 1,
            concurrency=len(plan.concurrency) > 1,
        )
    work = (
        _soak(plan, soak)
        if soak
        else _memory(plan)
        if memory
        else _wakeup(plan)
        if wakeup
        else _interruptions(plan, long_prompts)
        if long_prompts
        else _speed(plan)
    )
    report = asyncio.run(work)
    report.show(out)
    if json is not None:
        json.write_bytes(report.json())
    if report.soak is not None and (problems := report.soak.problems()):
        for problem in problems:
            say(f"error: {problem}")
        raise typer.Exit(1)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    :ivar costs: None but on the simulated device.
    :ivar constrained: percentages of requests, to be compared.
    """

    model: str
    settings: dict[str, Any]
    costs: SimCosts | None
    dtypes: list[str]
    depths: list[int]
    concurrency: list[int]
    rounds: int
    warmup: int
    heartbeat: bool
    against: str | None
    workload: Workload
    constrained: list[int]

    @property
    def workloads(self) -> list[tuple[str, Workload]]:
        """What each engine does, by what it is called."""
        if self.constrained == [0]:
            return [("", self.workload)]
        return [
            (f"{share}% constrained", msgspec.structs.replace(self.workload, constrained=share))
            for share in self.constrained
        ]

    @property
    def caches(self) -> list[tuple[str, dict[str, Any]]]:
        """Settings of the prefix cache to be compared, by what they are called.

        Without shared prompts there is none, unless it is asked for: rounds repeat their prompts.
        """
        if not self.workload.shared_prefix:
            return [("", {"prefix_cache": False})]
        return [("no prefix cache", {"prefix_cache": False}), ("prefix cache", {"prefix_cache": True})]

    @property
    def device(self) -> str:
        """Where steps run: ``cpu``, ``cuda`` or ``sim``."""
        if self.costs is not None:
            return "sim"
        import torch

        device: str = self.settings.get("device", "auto")
        return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    def report(self, **parts: Any) -> Report:
        return Report(
            model=self.model,
            device=self.device,
            settings=self.settings,
            workload=self.workload,
            rounds=self.rounds,
            **parts,
        )


class Entry:
    """An engine that is measured with some work, and what has been measured of it, by concurrency."""

    def __init__(
        self, engine: Engine, depth: int, concurrency: Iterable[int], *, workload: Workload, variant: str
    ) -> None:
        self.engine = engine
        self.workload = workload
        self.variant = variant
        self.depth = depth
        self.dtype, self.kernels = engine.limits.dtype, engine.limits.kernels
        self.rounds: dict[int, list[Round]] = {streams: [] for streams in concurrency}
        self.gaps: dict[int, list[float]] = {streams: [] for streams in concurrency}

    def figures(self, streams: int) -> Figures:
        gaps = self.gaps[streams]
        return Figures.of(
            self.rounds[streams],
            dtype=self.dtype,
            kernels=self.kernels,
            depth=self.depth,
            heartbeat=Heartbeat.of(gaps) if gaps else None,
            variant=self.variant,
        )


async def _speed(plan: Plan) -> Report:
    machine = Machine.here()
    idle = await idle_heartbeat() if plan.heartbeat else None
    async with _entries(plan) as entries:
        rates = None if plan.costs is not None else Rates.measure(plan.device)
        peers = _peers(plan, entries) if plan.against else []
        theirs: dict[str, list[float]] = {peer.dtype: [] for peer in peers}
        tokens: dict[str, list[int]] = {}
        for number in range(plan.rounds):
            # In turns, so that what else the machine does meets all of them.
            for entry in entries:
                for streams in plan.concurrency:
                    engine = f"{entry.dtype or entry.kernels}, depth {entry.depth}"
                    engine += f", {entry.variant}" if entry.variant else ""
                    say(f"round {number + 1} of {plan.rounds}: {engine}, {streams} streams")
                    work = entry.workload.afresh(number + 1).run(entry.engine, streams)
                    entry.rounds[streams].append(await (beside(work, entry.gaps[streams]) if plan.heartbeat else work))
            for peer in peers:
                say(f"round {number + 1} of {plan.rounds}: transformers, {peer.dtype}")
                prompt = plan.workload.prompt(0, entries[0].engine.limits.vocab_size)
                seconds, tokens[peer.dtype] = peer.run(prompt, plan.workload.output_tokens)
                theirs[peer.dtype].append(len(tokens[peer.dtype]) / seconds)
        runs = [entry.figures(streams) for entry in entries for streams in plan.concurrency]
        if rates is not None:
            rates = rates.best(Rates.measure(plan.device))
            runs = [_bounded(run, plan, rates) for run in runs]
        peer_figures = {
            dtype: PeerFigures(
                dtype=dtype,
                tok_s=median(rates_),
                tok_s_rounds=rates_,
                tokens=len(tokens[dtype]),
                tokens_equal=_equal(tokens[dtype], entries, dtype),
            )
            for dtype, rates_ in theirs.items()
        }
    return plan.report(
        machine=machine,
        runs=runs,
        idle_heartbeat=idle,
        rates=rates,
        transformers_version=_transformers_version() if peers else None,
        transformers=list(peer_figures.values()),
        ratios=compare(runs, peer_figures) if peer_figures else [],
        cost_model=None if plan.costs is None else await measure_cost_model(plan.costs),
    )


async def _memory(plan: Plan) -> Report:
    settings = {**plan.settings, "dtype": plan.dtypes[0], "pipeline_depth": plan.depths[0]}
    machine = Machine.here()
    return plan.report(
        machine=machine, memory=await measure_memory(plan.model, settings, plan.workload, plan.concurrency[0])
    )


async def _soak(plan: Plan, seconds: float) -> Report:
    streams = plan.concurrency[0]
    settings = {"max_rows": streams, **plan.settings, "dtype": plan.dtypes[0], "pipeline_depth": plan.depths[0]}
    machine = Machine.here()
    model = plan.model if plan.costs is None else SimModel(costs=plan.costs)
    cuda = plan.device == "cuda"
    soak = await measure_soak(model, settings, plan.workload, seconds, concurrency=streams, cuda=cuda)
    return plan.report(machine=machine, soak=soak)


async def _interruptions(plan: Plan, long_prompt: int) -> Report:
    machine = Machine.here()
    work, streams = plan.workload, plan.concurrency[0]
    settings = {
        "max_rows": streams + 1,
        "max_model_len": max(long_prompt + ANSWER, work.prompt_tokens + work.output_tokens),
        "prefix_cache": False,  # the streams' prompts are the same with each budget
        **plan.settings,
        "dtype": plan.dtypes[0],
        "pipeline_depth": plan.depths[0],
    }
    budget = settings.pop("max_step_tokens", EngineConfig().max_step_tokens)
    found = await measure_interruptions(
        plan.model,
        settings,
        work,
        streams,
        long_prompt,
        budgets=[budget, long_prompt + streams * work.prompt_tokens],
        warmup=plan.warmup,
    )
    return plan.report(machine=machine, interruptions=found)


async def _wakeup(plan: Plan) -> Report:
    machine = Machine.here()
    return plan.report(machine=machine, wakeups=await measure_wakeups())


@asynccontextmanager
async def _entries(plan: Plan) -> AsyncIterator[list[Entry]]:
    """All engines, open and warmed up. With room for exactly the work, so that several fit in memory."""
    work, widest = plan.workload, max(plan.concurrency)
    page_size = plan.settings.get("page_size", 16)
    room: dict[str, Any] = {"max_rows": widest}
    if "kv_memory" not in plan.settings:
        room["kv_pages"] = widest * -(-(work.prompt_tokens + work.output_tokens) // page_size)
    async with AsyncExitStack() as stack:
        entries = []
        for dtype in plan.dtypes:
            for depth, (cache_name, cache) in product(plan.depths, plan.caches):
                model = plan.model if plan.costs is None else SimModel(costs=plan.costs)
                settings = {**room, **cache, **plan.settings, "dtype": dtype, "pipeline_depth": depth}
                engine = await open_engine(model, settings)
                stack.push_async_callback(engine.aclose)
                for work_name, workload in plan.workloads:
                    variant = ", ".join(name for name in (cache_name, work_name) if name)
                    entries.append(Entry(engine, depth, plan.concurrency, workload=workload, variant=variant))
                    warmup = msgspec.structs.replace(workload, output_tokens=min(work.output_tokens, WARMUP_TOKENS))
                    for _ in range(plan.warmup):
                        for streams in plan.concurrency:
                            await warmup.run(engine, streams)
        yield entries


def _peers(plan: Plan, entries: list[Entry]) -> "list[TransformersPeer]":
    """transformers' model in each dtype that ours runs in, warmed up."""
    from aphoton.cli.peer import TransformersPeer

    peers = []
    for dtype in dict.fromkeys(entry.dtype for entry in entries):
        say(f"loading the same weights into transformers, {dtype}")
        peer = TransformersPeer(_checkpoint(plan.model), dtype)
        for _ in range(plan.warmup):
            peer.run(plan.workload.prompt(0, entries[0].engine.limits.vocab_size), WARMUP_TOKENS)
        peers.append(peer)
    return peers


def _checkpoint(model: str) -> "Checkpoint":
    from aphoton.models import find_checkpoint

    return find_checkpoint(model)


def _bounded(run: Figures, plan: Plan, rates: Rates) -> Figures:
    if run.step_ms is None:
        return run
    work = StepWork.of(
        _checkpoint(plan.model).config,
        rows=run.concurrency,
        context=plan.workload.prompt_tokens + plan.workload.output_tokens // 2,
        dtype=run.dtype,
    )
    return msgspec.structs.replace(run, bound=Bound.of(work, rates, run.step_ms))


def _equal(theirs: list[int], entries: list[Entry], dtype: str) -> int:
    """Tokens of the first request before ours and theirs differ."""
    entry = next(entry for entry in entries if entry.dtype == dtype)
    ours = next(iter(entry.rounds.values()))[-1].completions[0].token_ids
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _transformers_version() -> str:
    from importlib.metadata import version

    return version("transformers")


def _refuse(why: str, **given: object) -> None:
    """:raises InvalidRequest: for an option that was given and would be ignored."""
    for name, value in given.items():
        if value:
            raise InvalidRequest(name, why)
