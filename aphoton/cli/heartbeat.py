"""`beside`: whether the loop stays live, seen by a task that wants to run every millisecond."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

__all__ = ["Heartbeat", "beside", "idle_heartbeat"]

T = TypeVar("T")

BEAT = 1e-3
"""Seconds that the heartbeat sleeps."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps between beats, in milliseconds. On a loop with nothing else to do they are a little over 1 ms."""

    p50: float
    p99: float
    max: float
    beats: int

    @classmethod
    def of(cls, gaps: Sequence[float]) -> "Heartbeat":
        times = np.asarray(gaps) * 1e3
        p50, p99 = np.percentile(times, (50, 99)).tolist()
        return cls(p50=p50, p99=p99, max=float(times.max()), beats=len(times))


async def beside(work: Awaitable[T], gaps: list[float]) -> T:
    """Await ``work`` while a heartbeat task beats, and add the seconds between its beats to ``gaps``."""
    task = asyncio.create_task(_beat(gaps))
    try:
        return await work
    finally:
        task.cancel()


async def idle_heartbeat(seconds: float = 0.5) -> Heartbeat:
    """The heartbeat of this loop with nothing beside it: what the timer itself does."""
    gaps: list[float] = []
    await beside(asyncio.sleep(seconds), gaps)
    return Heartbeat.of(gaps)


async def _beat(gaps: list[float]) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(BEAT)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
