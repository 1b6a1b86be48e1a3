"""Deadlines: wherever a request is when its seconds are over, it ends, and holds nothing."""

import asyncio
from typing import Any, Literal

import pytest
from engine.machines import Counting, Gate, machine
from engine.simulated import Probe
from engine.waiting import idle, turns, until

from aphoton import AphotonError, DeadlineExceeded, Engine, EngineClosed, SimModel


class Clock:
    """The loop's clock, which a test puts forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        loop = asyncio.get_running_loop()
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + self.ahead)

    def pass_by(self, seconds: float) -> None:
        self.ahead += seconds


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def endless(**settings: Any) -> Engine:
    return Engine(SimModel(eos_token_ids=(), probe=settings.pop("probe", None)), **settings)


def test_the_error() -> None:
    assert issubclass(DeadlineExceeded, AphotonError) and issubclass(DeadlineExceeded, TimeoutError)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
async def test_while_it_runs(depth: Literal[1, 2], n: int, clock: Clock) -> None:
    async with endless(pipeline_depth=depth) as engine:
        stream = engine.stream([1], n=n, max_tokens=1000, deadline=1000)
        pieces = [await anext(stream)]
        stays = asyncio.create_task(engine.generate([1], max_tokens=200))
        await until(lambda: engine.stats().running == n + 1)
        clock.pass_by(1001)
        with pytest.raises(DeadlineExceeded, match="1000 seconds") as caught:  # noqa: PT012
            async for piece in stream:
                pieces.append(piece)  # noqa: PERF401
        assert all(piece.finish_reason is None for piece in pieces)
        assert engine.stats().running <= 1
        with pytest.raises(DeadlineExceeded) as again:
            await stream.completion()
        assert again.value is caught.value
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert len((await stays).token_ids) == 200, "the other one has not noticed"
        await idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("settings", [{"max_rows": 4}, {"max_rows": 1}, {"max_rows": 1, "max_waiting": 0}], ids=str)
@pytest.mark.parametrize("n", [1, 2])
async def test_at_every_call_of_the_device(
    n: int, settings: dict[str, int], depth: Literal[1, 2], clock: Clock
) -> None:
    """While it runs, in the queue, and at the door; in the midst of a tick."""
    for calls in range(1, 10):
        probe = Probe()
        async with endless(probe=probe, pipeline_depth=depth, **settings) as engine:
            stays = asyncio.create_task(engine.generate([1], max_tokens=30))
            await until(lambda engine=engine: engine.stats().tokens >= 2)
            task = asyncio.create_task(engine.generate([2], n=n, max_tokens=300, deadline=500.0))
            await until(lambda engine=engine: engine.stats().running + engine.stats().waiting == n + 1)
            probe.after(calls, lambda: clock.pass_by(501))
            with pytest.raises(DeadlineExceeded):
                await task
            assert not stays.done(), "it ended at once"
            assert len((await stays).token_ids) == 30
            await idle(engine)


async def test_while_its_text_is_tokenized(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with machine(monkeypatch, Counting(), tokenizer=gate) as engine:
        task = asyncio.create_task(engine.generate("x" * 5000, deadline=5))
        await until(gate.entered.is_set)
        clock.pass_by(6)
        with pytest.raises(DeadlineExceeded, match="not admitted"):
            await task
        gate.go.set()
        await idle(engine)
        assert engine.stats().tokens == 0


async def test_one_that_is_kept_changes_nothing_and_leaves_no_timer(clock: Clock) -> None:
    async with endless() as engine:
        expected = await engine.generate([3], max_tokens=20)
        stream = engine.stream([3], max_tokens=20, deadline=1e6)
        assert (await stream.completion()).outputs == expected.outputs
        aborted = engine.stream([3], max_tokens=2000, n=2, deadline=1e6)
        await anext(aborted)
        await aborted.aclose()
        for ended in (stream, aborted):
            assert ended._request is not None and ended._request._timer is not None
            assert ended._request._timer.cancelled()
        clock.pass_by(2e6)
        await turns(3)
        assert (await stream.completion()).outputs == expected.outputs
        assert (await aborted.completion()).finish_reason == "abort"
        await idle(engine)


async def test_what_the_caller_cancels_first_is_cancelled(clock: Clock) -> None:
    async with endless(max_rows=1, max_waiting=0) as engine:
        async with engine.stream([1], max_tokens=3000):
            task = asyncio.create_task(engine.generate([2], deadline=50))
            await until(lambda: engine.stats().waiting)
            task.cancel()
            clock.pass_by(51)
            with pytest.raises(asyncio.CancelledError):
                await task
        await idle(engine)


async def test_it_begins_with_the_request_and_not_with_the_stream(clock: Clock) -> None:
    async with endless() as engine:
        stream = engine.stream([1], max_tokens=5, deadline=50)
        clock.pass_by(51)
        assert len((await stream.completion()).token_ids) == 5
        late = engine.stream([1], deadline=50)
    with pytest.raises(EngineClosed):
        await anext(late)
