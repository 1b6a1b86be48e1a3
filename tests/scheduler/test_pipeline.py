"""The pipeline on the simulated device: every invariant over random schedules, and what catches it when broken."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from scheduler.scenario import Ask, Schedule, faulty_schedules, random_schedule, run, schedules

from aphoton import Engine, EngineDead, SimCosts, SimModel
from aphoton.scheduler import Pipeline, Scheduler, Sequence
from aphoton.scheduler.ends import Ends
from aphoton.scheduler.slot import Slot

MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.timeout(600)
def test_every_invariant_holds_on_thousands_of_schedules() -> None:
    async def all_of_them() -> None:
        for seed in range(2500):
            try:
                await run(random_schedule(seed))
            except BaseException as error:
                error.add_note(f"random_schedule({seed})")
                raise

    asyncio.run(all_of_them())


@pytest.mark.timeout(600)
@MANY
@given(schedules)
def test_every_invariant_holds_on_random_schedules(schedule: Schedule) -> None:
    asyncio.run(run(schedule))


@pytest.mark.timeout(600)
@MANY
@given(faulty_schedules)
def test_a_device_fault_ends_everyone_once_with_its_cause(schedule: Schedule) -> None:
    asyncio.run(run(schedule))


@pytest.mark.timeout(600)
@settings(MANY, max_examples=100)
@given(schedules)
def test_depths_give_the_same_tokens(schedule: Schedule) -> None:
    reads = tuple(Ask(**{**ask.__dict__, "leave": "read"}) for ask in schedule.asks)
    tokens = [
        [
            outcome.tokens
            for outcome in asyncio.run(run(Schedule(**{**schedule.__dict__, "asks": reads, "depth": depth})))
        ]
        for depth in (1, 2)
    ]
    assert tokens[0] == tokens[1]


# Broken on purpose: each of these must be caught.


def pages_freed_at_finalize(patch: pytest.MonkeyPatch) -> None:
    finish = Ends.finish

    def broken(self: Ends, sequence: Sequence, *args: Any, **kwargs: Any) -> None:
        if sequence.row:
            self._holdings.pool.release(self._holdings.tables.clear(sequence.row))
        finish(self, sequence, *args, **kwargs)

    patch.setattr(Ends, "finish", broken)


def row_freed_at_finalize(patch: pytest.MonkeyPatch) -> None:
    release = Ends.release
    finish = Ends.finish

    def broken(self: Ends, sequence: Sequence, *args: Any, **kwargs: Any) -> None:
        row = sequence.row
        finish(self, sequence, *args, **kwargs)
        if row and sequence.row:
            self._rows.refs[row] = 0
            release(self, sequence)

    patch.setattr(Ends, "finish", broken)
    patch.setattr(Ends, "release", lambda self, sequence: release(self, sequence) if sequence.row else None)


def slot_reused_before_its_read(patch: pytest.MonkeyPatch) -> None:
    init = Pipeline.__init__

    def broken(self: Pipeline, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.slots = (Slot(0), Slot(0))

    patch.setattr(Pipeline, "__init__", broken)


def zombies_not_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_alive", lambda self, step: np.ones(step.rows, np.bool_))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("checked", ["checks", "device only"])
@pytest.mark.parametrize(
    "defect",
    [
        pages_freed_at_finalize,
        row_freed_at_finalize,
        slot_reused_before_its_read,
        zombies_not_skipped,
    ],
)
def test_a_broken_pipeline_is_caught(
    defect: Callable[[pytest.MonkeyPatch], None], checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scheduler's invariants asserted at each step, and without: then the simulated device has to find it, or
    an assertion that is always there."""
    monkeypatch.setenv("APHOTON_DEBUG", "1" if checked == "checks" else "0")

    with monkeypatch.context() as patch:
        defect(patch)
        for seed in range(2500):
            try:
                asyncio.run(run(random_schedule(seed)))
            except (AssertionError, IndexError, KeyError, EngineDead, ExceptionGroup):
                return
    pytest.fail("2500 schedules did not notice")


# The cost model


async def _period(depth: int, costs: SimCosts, *, rows: int = 1, length: int = 200) -> float:
    """Virtual seconds a step."""
    async with Engine(SimModel(costs=costs, eos_token_ids=()), pipeline_depth=depth, max_rows=rows) as engine:
        done = await asyncio.gather(*(engine.generate([1 + i], max_tokens=length) for i in range(rows)))
    return sum(one.timings.itl or 0.0 for one in done) / rows


@pytest.mark.parametrize(
    "costs",
    [
        SimCosts(),
        SimCosts(forward=10e-3),
        SimCosts(launch=1e-3, commit=2e-3, forward=1e-3),
        SimCosts(launch=0.1e-3, commit=0.1e-3, forward=0.5e-3, sampling=0.4e-3, copy=0.3e-3),
    ],
)
async def test_blocking_costs_the_sum_and_pipelined_the_larger_part(costs: SimCosts) -> None:
    host, device = costs.launch + costs.commit, costs.forward + costs.sampling
    assert await _period(1, costs) == pytest.approx(host + device + costs.copy, rel=0.01)
    pipelined = await _period(2, costs)
    assert pipelined == pytest.approx(max(host, device), rel=0.01)
    assert pipelined < host + device + costs.copy - 0.9 * min(host, device)


async def _zombie_share(rows: int, length: int) -> float:
    """Rows computed for nothing, of all rows computed; ends by EOS, which cannot be foreseen."""

    def script(history: tuple[int, ...], seed: int, vocab: int) -> int:
        return 0 if len(history) >= length else 1

    async with Engine(SimModel(script=script, eos_token_ids=(0,)), max_rows=rows) as engine:
        for _ in range(5):
            await asyncio.gather(*(engine.generate([1], max_tokens=1000) for _ in range(rows)))
        stats = engine.stats()
    assert stats.tokens == 5 * rows * length
    return stats.zombies_total / (stats.tokens + stats.zombies_total)


async def test_the_zombie_tax_is_one_row_a_stream() -> None:
    for length in (5, 20, 100):
        assert await _zombie_share(1, length) == pytest.approx(1 / (length + 1), rel=0.05)


async def _steps(streams: int, length: int, *, foreseen: bool) -> int:
    """Steps that ``streams`` rows need for streams of this length, with as many rows to spare."""

    def script(history: tuple[int, ...], seed: int, vocab: int) -> int:
        return 0 if len(history) >= length and not foreseen else 1

    async with Engine(SimModel(script=script, eos_token_ids=(0,)), max_rows=2 * streams) as engine:

        async def one_after_the_other() -> None:
            for _ in range(10):
                await engine.generate([1], max_tokens=length if foreseen else 1000)

        await asyncio.gather(*(one_after_the_other() for _ in range(streams)))
        return engine.stats().steps


async def test_streams_that_end_unforeseen_cost_no_more_steps_in_company_than_alone() -> None:
    """A zombie's step computes its neighbours, too: what it costs in time is shared by the rows beside it."""
    for streams in (1, 8):
        taxed, free = [await _steps(streams, 20, foreseen=foreseen) for foreseen in (False, True)]
        assert free <= taxed <= free + 11, "a step for each stream's end at most, ten after each other"


async def test_a_foreseen_end_makes_no_zombie() -> None:
    async with Engine(SimModel(eos_token_ids=()), max_rows=4) as engine:
        await asyncio.gather(*(engine.generate([i], max_tokens=3 + i) for i in range(1, 9)))
        assert engine.stats().zombies_total == 0
