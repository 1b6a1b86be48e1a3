"""`Turnstile`: who passes when."""

import asyncio

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
