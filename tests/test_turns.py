"""Turns of the loop for others."""

import asyncio

from aphoton.turns import let_go_first


async def test_a_task_whose_timer_is_due_goes_first() -> None:
    ran = asyncio.Event()

    async def sleep_and_run() -> None:
        await asyncio.sleep(1e-9)  # a timer, as that of 0 is not
        ran.set()

    task = asyncio.create_task(sleep_and_run())
    await asyncio.sleep(0)  # its timer is set
    await let_go_first()
    assert ran.is_set()
    await task
