"""More requests than there is room for."""

import asyncio
from typing import Any, Literal

import pytest
from engine.simulated import saying
from engine.waiting import idle, turns, until

from aphoton import Completion, Engine, EngineOverloaded, SimModel


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_waiting", [0, 1, 3, 100])
@pytest.mark.parametrize("max_rows", [1, 3])
async def test_all_wait_their_turn(max_rows: int, max_waiting: int, depth: Literal[1, 2]) -> None:
    """In the queue or at its door: first come, first served."""
    began: list[int] = []
    model = SimModel(eos_token_ids=())
    async with Engine(model, max_rows=max_rows, max_waiting=max_waiting, pipeline_depth=depth) as engine:

        async def ask(number: int) -> Completion:
            stream = engine.stream([1 + number], max_tokens=4)
            await anext(stream)
            began.append(number)
            return await stream.completion()

        tasks = [asyncio.create_task(ask(number)) for number in range(12)]
        await turns(1)
        assert engine.stats().waiting == 12, "those at the door count as waiting"
        await turns(2)
        assert engine.stats().running == max_rows
        scheduler = engine._scheduler
        assert scheduler is not None

        async def watch() -> None:
            while not all(task.done() for task in tasks):
                assert len(scheduler.waiting) <= max_waiting + scheduler.rows.free
                await asyncio.sleep(0)

        done, _ = await asyncio.gather(asyncio.gather(*tasks), watch())
        assert all(len(one.token_ids) == 4 for one in done)
        assert sorted(began) == list(range(12))
        assert all(abs(place - number) < max_rows for place, number in enumerate(began))
        queued = [one.timings.queued for one in done]
        assert queued == sorted(queued)
        await idle(engine)


async def test_one_that_does_not_fit_yet_is_not_overtaken() -> None:
    """A long request waits for pages; a short one that would fit waits behind it."""
    async with Engine(SimModel(eos_token_ids=()), max_rows=3, kv_pages=10, page_size=4) as engine:
        tasks = [
            asyncio.create_task(engine.generate([number] * tokens, max_tokens=8))
            for number, tokens in enumerate((20, 24, 1))  # 5, 6 and 1 pages, and one to go on with
        ]
        await turns(5)
        assert (engine.stats().running, engine.stats().waiting) == (1, 2)
        first, second, third = await asyncio.gather(*tasks)
        assert third.timings.queued >= second.timings.queued > first.timings.queued
        await idle(engine)


@pytest.mark.parametrize("max_waiting", [0, 2])
async def test_raise_when_the_queue_is_full(max_waiting: int) -> None:
    async with Engine(saying("forever", end=False), max_rows=2, max_waiting=max_waiting, overload="raise") as engine:
        places = 2 + max_waiting
        tasks = [asyncio.create_task(engine.generate([1], max_tokens=1000)) for _ in range(places)]
        await turns(3)
        for _ in range(3):
            with pytest.raises(EngineOverloaded, match="max_waiting"):
                await engine.generate([1])
        with pytest.raises(EngineOverloaded):
            await anext(engine.stream([1]))
        tasks[0].cancel()
        await until(
            lambda: engine.stats().zombies == 0 and tasks[0].done() and engine.stats().running == min(places - 1, 2)
        )
        tasks.append(asyncio.create_task(engine.generate([1], max_tokens=3)))
        await turns(1)
        with pytest.raises(EngineOverloaded):
            await engine.generate([1])
        for task in tasks[1:-1]:
            task.cancel()
        assert (await tasks[-1]).text == "for"
        await idle(engine)


async def test_a_burst_fills_the_rows_before_it_counts_as_waiting() -> None:
    async with Engine(SimModel(eos_token_ids=()), max_rows=4, max_waiting=0, overload="raise") as engine:
        results = await asyncio.gather(*(engine.generate([1], max_tokens=3) for _ in range(6)), return_exceptions=True)
        assert [type(one) for one in results] == [Completion] * 4 + [EngineOverloaded] * 2


async def test_giving_up_at_the_door_lets_the_next_in() -> None:
    async with Engine(saying("forever", end=False), max_rows=1, max_waiting=0) as engine:
        first, *others = [asyncio.create_task(engine.generate([1], max_tokens=20)) for _ in range(6)]
        await turns(3)
        others[0].cancel()  # the head of the line
        others[2].cancel()
        first.cancel()  # in the same turn as its place comes free
        results = await asyncio.gather(first, *others, return_exceptions=True)
        cancelled = [isinstance(one, asyncio.CancelledError) for one in results]
        assert cancelled == [True, True, False, True, False, False]
        await idle(engine)


@pytest.mark.parametrize("turn", range(1, 40))
async def test_giving_up_at_the_door_in_any_turn(turn: int) -> None:
    """Also in the turn in which it is let in."""
    async with Engine(saying("Hello"), max_rows=1, max_waiting=0) as engine:
        asks: list[dict[str, Any]] = [{}, {}, {"max_tokens": 2000, "ignore_eos": True}, {}]
        tasks = [asyncio.create_task(engine.generate([1], **sampling)) for sampling in asks]
        await turns(turn)
        assert tasks[2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results.pop(2), asyncio.CancelledError)
        assert all(isinstance(result, Completion) and result.text == "Hello" for result in results)
        await idle(engine)
        assert engine.stats().tokens < 50, "what was given up did not run on"
