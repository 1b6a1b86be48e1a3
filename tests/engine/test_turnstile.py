"""`Turnstile`: who passes when."""

import asyncio
import itertools

import pytest
from engine.waiting import idle, until

from aphoton import CompletionStream, Engine, EngineClosed, EngineDead, SimModel
from aphoton.turnstile import Turnstile


async def test_a_few_pass_in_each_turn_in_the_order_of_arrival() -> None:
    turnstile, passed = Turnstile(3), list[int]()

    async def enter(number: int) -> None:
        await turnstile.enter()
        passed.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(8)]
    seen = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append(len(passed))
    assert passed == list(range(8))
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 3


async def test_alone_nobody_waits() -> None:
    turnstile = Turnstile(1)
    for _ in range(3):
        coroutine = turnstile.enter()
        try:
            coroutine.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waits")
        await asyncio.sleep(0)


async def test_a_cancelled_one_leaves_its_place_to_the_next() -> None:
    turnstile = Turnstile(1)
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    async with asyncio.timeout(5):
        await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [False, True, True, False]


async def test_waiters_that_are_called_run_a_few_in_each_turn() -> None:
    turnstile, woken = Turnstile(2), list[int]()
    loop = asyncio.get_running_loop()
    waiters: list[asyncio.Future[None]] = [loop.create_future() for _ in range(7)]

    async def wait(number: int) -> None:
        await waiters[number]
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(7)]
    await asyncio.sleep(0)
    for waiter in waiters:
        turnstile.call(waiter)
    tasks[4].cancel()  # while it stands in line
    seen = [0]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append(len(woken))
    assert woken == [0, 1, 2, 3, 5, 6]
    assert max(after - before for before, after in itertools.pairwise(seen)) == 2


async def test_others_have_turns_between_the_consumers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aphoton.engine.CONSUMERS", 4)
    woken, most = 0, 0
    async with Engine(SimModel(turns=(20,), vocab_size=300), max_rows=32, max_model_len=256) as engine:

        async def consume() -> None:
            nonlocal woken
            async for _ in engine.stream([1, 2, 3], max_tokens=50, ignore_eos=True):
                woken += 1

        tasks = [asyncio.create_task(consume()) for _ in range(32)]
        while not all(task.done() for task in tasks):
            before = woken
            await asyncio.sleep(0)
            most = max(most, woken - before)
    assert woken == 32 * 50
    assert most == 4


@pytest.mark.parametrize("end", ["close", "die", "cancel", "abort"])
async def test_an_end_reaches_all_who_stand_in_line(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """With several choices behind one waiter, too; from another thread, too."""
    monkeypatch.setattr("aphoton.engine.CONSUMERS", 1)
    engine = await Engine(SimModel(turns=(20,), vocab_size=300), max_rows=64, max_model_len=4096).start()
    streams = [engine.stream([1, 2, 3], max_tokens=3000, ignore_eos=True, n=1 + 2 * (i % 2)) for i in range(30)]
    begun = 0

    async def consume(stream: CompletionStream) -> list[str | None]:
        nonlocal begun
        reasons = []
        async for piece in stream:
            begun += not reasons
            reasons.append(piece.finish_reason)
        return reasons

    tasks = [asyncio.create_task(consume(stream)) for stream in streams]
    async with asyncio.timeout(20):
        await until(lambda: begun == 30 and len(engine._consumers) > 10)
        match end:
            case "close":
                await engine.aclose()
            case "die":
                engine._die(RuntimeError("a fault"))
            case "cancel":
                for task in tasks:
                    task.cancel()
            case _:
                for stream in streams:
                    await asyncio.to_thread(asyncio.run, stream.aclose())
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    if end == "abort":
        assert all(isinstance(reasons, list) for reasons in ends)
    else:
        expected = {"close": EngineClosed, "die": EngineDead, "cancel": asyncio.CancelledError}[end]
        assert {type(one) for one in ends} == {expected}
    if end in ("cancel", "abort"):
        await idle(engine)
    await engine.aclose()
    assert not len(engine._consumers)


async def test_fewer_pass_where_turns_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And more again where they are not; a quarter do in any case."""
    now = 0.0
    monkeypatch.setattr("aphoton.turnstile.time.perf_counter", lambda: now)
    turnstile = Turnstile(8)
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(80)]
    passed = []
    for took in [0.0, 1e-3, 1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 1e-4, 1e-4]:
        before = sum(task.done() for task in tasks)
        now += took
        await asyncio.sleep(0)
        passed.append(sum(task.done() for task in tasks) - before)
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)
    assert passed == [8, 0, 4, 2, 2, 2, 4, 8, 8]  # whoever stood in line runs in the turn after


async def test_whoever_takes_longer_counts_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aphoton.turnstile.LONG", 10.0)  # whatever the machine does
    turnstile, loop = Turnstile(8), asyncio.get_running_loop()
    waiters: list[asyncio.Future[None]] = [loop.create_future() for _ in range(9)]
    for number, waiter in enumerate(waiters):
        turnstile.call(waiter, 4 if number < 3 else 1)
    for waiter in waiters[1:5]:  # the second has passed, and the others stand in line
        turnstile.weigh(waiter, 4)
    waiters[5].cancel()
    turnstile.weigh(waiters[5], 4)
    done = [sum(waiter.done() for waiter in waiters)]
    while done[-1] < 9:
        await asyncio.sleep(0)
        done.append(sum(waiter.done() for waiter in waiters))
    assert [after - before for before, after in itertools.pairwise([0, *done]) if after > before] == [3, 2, 4]


async def test_whoever_stands_in_line_when_its_request_ends_counts_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aphoton.engine.CONSUMERS", 8)
    monkeypatch.setattr("aphoton.request.ENDING", 4)
    ended, most = 0, 0
    async with Engine(SimModel(turns=(1,), vocab_size=300), max_rows=64, max_model_len=256) as engine:

        async def consume() -> None:
            nonlocal ended
            async for _ in engine.stream([1, 2, 3], max_tokens=50, ignore_eos=True):
                pass
            ended += 1

        tasks = [asyncio.create_task(consume()) for _ in range(64)]
        lined = 0
        while not all(task.done() for task in tasks):
            before = ended
            await asyncio.sleep(0)
            most, lined = max(most, ended - before), max(lined, len(engine._consumers))
    assert lined > 40, "a step comes before those of the last one have all passed"
    assert ended == 64
    assert most == 2
