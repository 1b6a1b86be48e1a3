"""Waiting in turns of the loop, without sleeping, and what must hold when nobody is there."""

import asyncio
import time
from collections.abc import Callable

from aphoton import Engine


async def turns(count: int) -> None:
    """Let the loop take so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop take turns until ``condition()``. The test's time-out ends what never comes.

    A turn without a pause gives up the GIL for too short a time for a thread that waits for it to wake and take it, and
    the device on the CPU, a thread of many calls that release it, would take a thousand times as long.
    """
    while not condition():
        time.sleep(1e-6)  # noqa: ASYNC251
        await asyncio.sleep(0)


async def idle(engine: Engine) -> None:
    """Wait until nobody runs or waits, and then nothing must be held."""

    def nobody() -> bool:
        stats = engine.stats()
        return not (stats.running or stats.waiting or stats.zombies)

    await until(nobody)
    assert_nothing_held(engine)


def assert_nothing_held(engine: Engine) -> None:
    """What must hold when nobody is there, by the public figures and by the scheduler's own."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.zombies, stats.pages_used) == (0, 0, 0, 0)
    assert stats.pages_free + stats.pages_cached == engine.limits.pages - 1
    scheduler, pipeline = engine._scheduler, engine._pipeline
    assert scheduler is not None and pipeline is not None
    scheduler.check_idle()
    assert not pipeline.inflight and all(slot.free for slot in pipeline.slots)
    assert not engine._door
