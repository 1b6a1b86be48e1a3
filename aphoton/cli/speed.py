"""`measure_speed`: throughput, latencies, and where the time of a step goes."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from aphoton import Engine
from aphoton.cli.bound import Bound, Rates, StepWork
from aphoton.cli.comparison import PeerFigures, compare
from aphoton.cli.costmodel import measure_cost_model
from aphoton.cli.engine import open_engine
from aphoton.cli.figures import Figures
from aphoton.cli.heartbeat import Heartbeat, beside, idle_heartbeat
from aphoton.cli.machine import Machine
from aphoton.cli.plan import Plan
from aphoton.cli.report import Report
from aphoton.cli.terminal import say
from aphoton.cli.workload import Round, Workload
from aphoton.heap import frozen_heap

if TYPE_CHECKING:  # these bring torch
    from aphoton.cli.peer import TransformersPeer
    from aphoton.models import Checkpoint

__all__ = ["measure_speed"]

WARMUP_TOKENS = 16


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


async def measure_speed(plan: Plan) -> Report:
    """Throughput, latencies and phases of all engines of the plan, in turns, and of the peer."""
    machine = Machine.here(plan.device)
    idle = await idle_heartbeat() if plan.heartbeat else None
    async with _entries(plan) as entries, AsyncExitStack() as stack:
        rates = None if plan.costs is not None else Rates.measure(plan.device)
        peers = _peers(plan, entries) if plan.against else []
        stack.enter_context(frozen_heap())  # now that all is loaded, as README says that a program should
        theirs: dict[str, list[float]] = {peer.dtype: [] for peer in peers}
        tokens: dict[str, list[int]] = {}
        done: Counter[Engine] = Counter()  # runs, in one order for all engines, so that each has the same prompts
        for number in range(plan.rounds):
            # In turns, so that what else the machine does meets all of them.
            for entry in entries:
                for streams in plan.concurrency:
                    engine = f"{entry.dtype or entry.kernels}, depth {entry.depth}"
                    engine += f", {entry.variant}" if entry.variant else ""
                    say(f"round {number + 1} of {plan.rounds}: {engine}, {streams} streams")
                    done[entry.engine] += 1
                    work = entry.workload.afresh(done[entry.engine]).run(entry.engine, streams)
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


@asynccontextmanager
async def _entries(plan: Plan) -> AsyncIterator[list[Entry]]:
    """All engines, open and warmed up. With room for exactly the work, so that several fit in memory."""
    work, widest = plan.workload, max(plan.concurrency)
    page_size = plan.settings.get("page_size", 16)
    room: dict[str, Any] = {"max_rows": widest}
    if "kv_memory" not in plan.settings:
        room["kv_pages"] = widest * -(-work.longest // page_size)
    async with AsyncExitStack() as stack:
        entries = []
        for dtype in plan.dtypes:
            for depth, (cache_name, cache) in product(plan.depths, plan.caches):
                settings = {**room, **cache, **plan.settings, "dtype": dtype, "pipeline_depth": depth}
                engine = await open_engine(plan.source, settings)
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
        context=(plan.workload.longest + plan.workload.prompt_tokens) // 2,
        dtype=run.dtype,
    )
    return msgspec.structs.replace(run, bound=Bound.of(work, rates, run.step_ms))


def _equal(theirs: list[int], entries: list[Entry], dtype: str) -> int:
    """Tokens of the first request before ours and theirs differ."""
    entry = next(entry for entry in entries if entry.dtype == dtype)
    ours = next(iter(entry.rounds.values()))[-1].completions[0, 0].token_ids
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _transformers_version() -> str:
    from importlib.metadata import version

    return version("transformers")
