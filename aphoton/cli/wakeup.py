"""`measure_wakeups`: how long after a CUDA event the coroutine that awaits it runs, by way of waiting."""

import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, Protocol

import msgspec

from aphoton.cli.heartbeat import beside
from aphoton.errors import InvalidRequest

__all__ = ["Wakeup", "measure_wakeups"]

STEPS_MS = (0.3, 1.0, 3.0, 10.0)
"""Lengths of the device's work."""
WAITS = 150


class Wakeup(msgspec.Struct, frozen=True, kw_only=True):
    """One way of waiting for work of one length.

    :ivar delay_p50, delay_p99: from the event to the coroutine, in microseconds.
    :ivar cpu: cores that this process kept busy.
    :ivar gap_p50, gap_p99: of a 1 ms heartbeat on the same loop, in milliseconds.
    """

    strategy: str
    step_ms: float
    delay_p50: float
    delay_p99: float
    cpu: float
    gap_p50: float
    gap_p99: float


class Waiting(Protocol):
    """A strategy of `aphoton.device.cuda.wakeup`."""

    async def wait(self, event: Any, kind: object, since: float) -> None: ...
    def learn(self, kind: object, took: float) -> None: ...


async def measure_wakeups() -> list[Wakeup]:
    """:raises InvalidRequest: without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise InvalidRequest("wakeup", "there is no CUDA event to wait for: this machine has no GPU")
    from aphoton.device.cuda.wakeup import STRATEGIES

    rate = _cycles_per_ms()
    found = []
    for step_ms in STEPS_MS:
        for name, strategy in STRATEGIES.items():
            wait = strategy()
            gaps: list[float] = []
            cpu, begin = time.process_time(), time.perf_counter()
            delays = await beside(_delays(wait, int(step_ms * rate)), gaps)
            cpu, real = time.process_time() - cpu, time.perf_counter() - begin
            wait.close()
            found.append(
                Wakeup(
                    strategy=name,
                    step_ms=step_ms,
                    delay_p50=median(delays) * 1e6,
                    delay_p99=_p99(delays) * 1e6,
                    cpu=cpu / real,
                    gap_p50=median(gaps) * 1e3,
                    gap_p99=_p99(gaps) * 1e3,
                )
            )
    return found


def _cycles_per_ms() -> float:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):  # the clocks rise first
        begin.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        end.synchronize()
    return 1e7 / float(begin.elapsed_time(end))


async def _delays(wait: Waiting, cycles: int) -> list[float]:
    """Seconds from the event to the coroutine, of many waits."""
    import torch

    delays = []
    for _ in range(WAITS):
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = time.perf_counter()
        begun.record()
        begun.synchronize()
        since = time.perf_counter()
        torch.cuda._sleep(cycles)
        done.record()
        await wait.wait(done, cycles, since)
        # The first event was somewhere between these two, which are some ten microseconds apart.
        begun_at = (before + since) / 2
        delays.append(time.perf_counter() - begun_at - begun.elapsed_time(done) * 1e-3)
        wait.learn(cycles, begun.elapsed_time(done) * 1e-3)
    return delays


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[-1] if len(values) > 1 else values[0]
