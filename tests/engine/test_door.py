"""`Door`: its invariants, after any order of arrivals, ticks and cancellations."""

import asyncio
import random

import numpy as np
import pytest
from engine.waiting import turns

from aphoton import EngineClosed, EngineOverloaded
from aphoton.device.base import Limits, Results
from aphoton.door import Door
from aphoton.sampling import RowSampling
from aphoton.scheduler import Scheduler, Sequence
from aphoton.scheduler.slot import Slot
from aphoton.scheduler.step import Step


def scheduler() -> Scheduler:
    limits = Limits(vocab_size=10, max_model_len=40, pages=11, eos_token_ids=())
    return Scheduler(limits, max_rows=3, page_size=4, max_step_tokens=64, now=lambda: 0.0, check=True)


def sequence(limit: int, priority: int = 0) -> Sequence:
    return Sequence(np.array([1], np.int32), limit=limit, sampling=RowSampling(seed=0), priority=priority)


def tick(of: Scheduler) -> None:
    """A step, launched and committed."""
    chosen = of.next_batch()
    if chosen is not None:
        batch, sequences = chosen
        results = Results(tokens=np.ones(len(sequences), np.int32), began=0.0, ended=0.0)
        of.commit(Step(number=1, slot=Slot(0), batch=batch, sequences=sequences), results)


@pytest.mark.parametrize("max_waiting", [0, 1, 4])
@pytest.mark.parametrize("seed", range(10))
async def test_in_the_order_of_arrival_whoever_gives_up(seed: int, max_waiting: int) -> None:
    rng = random.Random(seed)
    below = scheduler()
    entered: list[Sequence] = []
    door = Door(below, max_waiting=max_waiting, overload="wait", wake=lambda: entered.append(list(below.waiting)[-1]))
    arrived: dict[Sequence, asyncio.Task[None]] = {}
    for _ in range(1000):
        act = rng.choice(["arrive", "arrive", "give up", "abort", "tick", "tick"])
        if act == "arrive":
            new = sequence(rng.choice([1, 2, 5, 20]))
            arrived[new] = asyncio.create_task(door.enter(new))
        elif act == "give up" and (waiting := [new for new, task in arrived.items() if not task.done()]):
            not_told = [new for new in waiting if new in entered]
            leaver = rng.choice(not_told or waiting)
            arrived[leaver].cancel()
            await turns(1)
            assert leaver.finalized or leaver not in entered, "what was given up does not run on"
        elif act == "abort" and entered:
            below.ends.abort(rng.choice(entered))
        elif act == "tick":
            tick(below)
        # Without a turn between, what happens next meets those who have been let in and have not been told.
        if rng.random() < 0.4:
            await turns(1)
            assert len(door) == sum(not task.done() for new, task in arrived.items() if new not in entered)
        assert not len(door) or door._full(), "each place is given at once"
    while len(door) or not below.idle:
        tick(below)
        await turns(1)
    results = await asyncio.gather(*arrived.values(), return_exceptions=True)
    given_up = [new for new, result in zip(arrived, results, strict=True) if result is not None]
    assert all(isinstance(result, asyncio.CancelledError | None) for result in results)
    assert entered == [new for new in arrived if new in set(entered)], "nobody overtakes"
    assert all(new in given_up for new in arrived if new not in set(entered)), "nobody is forgotten"
    assert all(new.finish_reason in ("abort", "length") for new in entered)
    assert set(given_up) & set(entered), "some gave up between being let in and being told"
    below.check_idle()


async def test_the_urgent_go_first_in_line_too() -> None:
    below = scheduler()
    door = Door(below, max_waiting=1, overload="wait", wake=lambda: None)
    priorities = (0, 0, 0, 0, 5, 0, -1, 5, -1)
    asks = [sequence(1, priority) for priority in priorities]
    tasks = [asyncio.create_task(door.enter(one)) for one in asks]
    await turns(1)
    assert len(door) == 5
    while len(door) or not below.idle:
        tick(below)
        await turns(1)
    await asyncio.gather(*tasks)
    let_in = sorted(asks, key=lambda one: one.arrival)
    assert [asks.index(one) for one in let_in] == [0, 1, 2, 3, 6, 8, 5, 4, 7]


async def test_closing_refuses_each_who_stands_in_line() -> None:
    below = scheduler()
    door = Door(below, max_waiting=0, overload="wait", wake=lambda: None)
    tasks = [asyncio.create_task(door.enter(sequence(5))) for _ in range(6)]
    await turns(1)
    assert len(door) == 3
    tasks[3].cancel()
    door.close(lambda: EngineClosed("closed"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results[:4]] == [type(None)] * 3 + [asyncio.CancelledError]
    assert all(isinstance(result, EngineClosed) for result in results[4:]) and results[4] is not results[5]
    assert not len(door) and len(below.waiting) == 3, "who is past the door is not its business"


async def test_a_full_queue_is_told_where_nobody_is_to_wait() -> None:
    below = scheduler()
    door = Door(below, max_waiting=1, overload="raise", wake=lambda: None)
    for _ in range(4):
        await door.enter(sequence(5))
    with pytest.raises(EngineOverloaded, match="max_waiting: 1"):
        await door.enter(sequence(5))
    tick(below)
    with pytest.raises(EngineOverloaded):
        await door.enter(sequence(5))
    below.ends.abort(next(iter(below.waiting)))
    await door.enter(sequence(5))
