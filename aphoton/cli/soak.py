"""`measure_soak`: an engine under mixed load near its capacity for long, and whether anything fails, grows or stays."""

import asyncio
import time
from contextlib import aclosing
from typing import Any

import msgspec

from aphoton import InvalidRequest, SimModel
from aphoton.cli.engine import open_engine
from aphoton.cli.figures import Spread
from aphoton.cli.load import Load, Seen
from aphoton.cli.memory import MEBI, Resident
from aphoton.cli.terminal import say
from aphoton.cli.workload import Workload

__all__ = ["Soak", "measure_soak"]

LOAD = 0.9
"""Of the capacity."""
CALIBRATION = 0.1
"""Of the time, to measure the capacity, and at most `LONGEST_CALIBRATION` seconds."""
LONGEST_CALIBRATION = 30.0
TENTHS = 10
"""Times that memory is looked at meanwhile."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Memory at one moment.

    :ivar at: seconds since the first request.
    :ivar mib: this process's on the host (``resident``), and on a GPU torch's (``reserved``, ``allocated``) and what
        is in use of the whole GPU (``used``).
    """

    at: float
    mib: dict[str, float]


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. TTFT and ITL are a consumer's, between pieces; times are real on the simulated device, too.

    :ivar dtype, kernels, depth: of the engine.
    :ivar concurrency: streams of the calibration, each taking the next request when its last one has ended.
    :ivar capacity: requests a second that ended in the calibration.
    :ivar rate: requests a second that were sent, on average; when each came was left to chance.
    :ivar seconds: from the first request to the end of the last.
    :ivar requests: sent; ``finished``, ``cancelled`` and ``failed`` together.
    :ivar cancelled: given up, by the way in which that was done.
    :ivar unseen: of these, those that had not had a token.
    :ivar failed: by error, those of the calibration too.
    :ivar most_running, most_waiting: seen at any arrival or first token.
    :ivar memory: after the calibration, at each tenth of the time, and at the end.
    :ivar growth: MiB, from the first to the last of these, garbage collected.
    :ivar pages_used, rows, zombies: held by the engine when all requests had ended. None when it had died.
    :ivar died: of what.
    """

    dtype: str
    kernels: str
    depth: int
    concurrency: int
    capacity: float
    rate: float
    seconds: float
    requests: int
    finished: int
    cancelled: dict[str, int]
    unseen: int
    failed: dict[str, int]
    tok_s: float
    ttft: Spread | None
    itl: Spread | None
    most_running: int
    most_waiting: int
    memory: list[Sample]
    growth: dict[str, float]
    pages_used: int | None
    rows: int | None
    zombies: int | None
    died: str | None

    def problems(self) -> list[str]:
        """What must not be, a line for each."""
        lines = [f"{count} requests failed: {error}" for error, count in self.failed.items()]
        held = {"KV pages": self.pages_used, "rows": self.rows, "zombies": self.zombies}
        lines += [f"{count} {what} did not come back" for what, count in held.items() if count]
        return lines if self.died is None else [*lines, self.died]


async def measure_soak(
    model: str | SimModel,
    settings: dict[str, Any],
    workload: Workload,
    seconds: float,
    *,
    concurrency: int,
    device: str,
) -> Soak:
    """Measure what the engine can do with requests of all kinds, then send it nine tenths of that.

    :param workload: its lengths are the longest.
    :param device: where it runs; of a GPU, look at the memory, too.
    :raises InvalidRequest: when the longest request cannot fit.
    :raises MissingExtra: when psutil is not installed.
    """
    memory = _Memory(device)
    async with aclosing(await open_engine(model, settings)) as engine:
        limits, depth, page_size = engine.limits, engine.config.pipeline_depth, engine.config.page_size
        longest = workload.prompt_tokens + workload.output_tokens
        room = min(limits.max_model_len, (limits.pages - 1) * page_size)
        if longest > room:
            raise InvalidRequest("prompt_tokens", f"with the new tokens that is up to {longest}, and {room} have room")
        load = Load(engine, workload)
        say(f"measuring the capacity: {concurrency} streams")
        capacity = await load.calibrate(concurrency, min(CALIBRATION * seconds, LONGEST_CALIBRATION))
        rate = LOAD * capacity
        load.seen = Seen(failed=load.seen.failed)
        samples = [memory.settled(0.0)]
        tokens, begin = load.tokens(), time.perf_counter()
        if not load.over:
            say(f"{seconds:g} s of {rate:.1f} requests a second")
            await load.send(rate, seconds, memory.watch(seconds, samples))
        elapsed = time.perf_counter() - begin
        tokens = load.tokens() - tokens
        left = await load.settle()
        samples.append(memory.settled(time.perf_counter() - begin))
    seen, first, last = load.seen, samples[0].mib, samples[-1].mib
    return Soak(
        dtype=limits.dtype,
        kernels=limits.kernels,
        depth=depth,
        concurrency=concurrency,
        capacity=capacity,
        rate=rate,
        seconds=elapsed,
        requests=seen.requests,
        finished=seen.finished,
        cancelled=dict(sorted(seen.cancelled.items())),
        unseen=seen.unseen,
        failed=dict(seen.failed),
        tok_s=tokens / elapsed,
        ttft=seen.ttft.spread(),
        itl=seen.itl.spread(),
        most_running=seen.most_running,
        most_waiting=seen.most_waiting,
        memory=samples,
        growth={name: last[name] - first[name] for name in first},
        pages_used=None if left is None else left.pages_used,
        rows=None if left is None else left.running + left.zombies,
        zombies=None if left is None else left.zombies,
        died=load.died,
    )


class _Memory:
    """What memory is in use."""

    def __init__(self, device: str) -> None:
        self._resident = Resident()
        self._device = device

    def settled(self, at: float) -> Sample:
        """Once what nobody holds is gone."""
        self._resident.now()
        return self.sample(at)

    def sample(self, at: float) -> Sample:
        mib = {"resident": self._resident.read()}
        if self._device.startswith("cuda"):
            import torch

            free, total = torch.cuda.mem_get_info(self._device)
            mib["reserved"] = torch.cuda.memory_reserved(self._device) / MEBI
            mib["allocated"] = torch.cuda.memory_allocated(self._device) / MEBI
            mib["used"] = (total - free) / MEBI
        return Sample(at=at, mib=mib)

    async def watch(self, seconds: float, samples: list[Sample]) -> None:
        """Add a sample at each tenth of a time."""
        begin = time.perf_counter()
        for tenth in range(1, TENTHS + 1):
            await asyncio.sleep(begin + seconds * tenth / TENTHS - time.perf_counter())
            samples.append(self.sample(time.perf_counter() - begin))
