"""`measure_memory`: whether many requests, and a second engine, take more memory than the first few did."""

import gc
import threading
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import msgspec

from aphoton.cli.engine import open_engine
from aphoton.cli.missing import load_extra
from aphoton.cli.workload import Workload

__all__ = ["MEBI", "Memory", "Resident", "measure_memory"]

MEBI = 1 << 20
SAMPLES = 10
"""Times that memory is looked at while the requests run."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory of this process, in MiB: its own, and the pages of files (libraries for one) that it has mapped.

    :ivar dtype, kernels, depth: of the engines.
    :ivar after_warmup: with the engine open and its first requests done.
    :ivar samples: evenly spread over the requests, garbage included.
    :ivar growth: from after the warm-up to after the last request, garbage collected.
    :ivar first_peak, second_peak: the most that was resident while the first engine, then another one after it was
        closed, loaded and ran.
    :ivar between: after the first was closed.
    """

    dtype: str
    kernels: str
    depth: int
    requests: int
    warmup_requests: int
    concurrency: int
    before: float
    after_warmup: float
    samples: list[float]
    growth: float
    first_peak: float
    between: float
    second_peak: float


async def measure_memory(model: str, settings: dict[str, Any], workload: Workload, concurrency: int) -> Memory:
    """Run the workload's requests on one engine; close it; open another and run its warm-up.

    :raises MissingExtra: when psutil is not installed.
    """
    resident = Resident()
    before = resident.now()
    total = workload.requests or 1
    part = msgspec.structs.replace(workload, requests=max(1, total // SAMPLES))
    # All prompts of a part: what the prefix cache keeps of them is there then, and the second engine gets as many.
    warmup = msgspec.structs.replace(part, requests=max(2 * concurrency, part.requests or 1))
    samples: list[float] = []
    with resident as first:
        async with aclosing(await open_engine(model, settings)) as engine:
            await warmup.run(engine, concurrency)
            after_warmup = resident.now()
            while len(samples) * (part.requests or 1) < total:
                await part.run(engine, concurrency)
                samples.append(resident.read())
            after = resident.now()
            limits, depth = engine.limits, engine.config.pipeline_depth
        del engine
    between = resident.now()
    first_peak = first.peak
    with resident as second:
        async with aclosing(await open_engine(model, settings)) as engine:
            await warmup.run(engine, concurrency)
    return Memory(
        dtype=limits.dtype,
        kernels=limits.kernels,
        depth=depth,
        requests=len(samples) * (part.requests or 1),
        warmup_requests=warmup.requests or 0,
        concurrency=concurrency,
        before=before,
        after_warmup=after_warmup,
        samples=samples,
        growth=after - after_warmup,
        first_peak=first_peak,
        between=between,
        second_peak=second.peak,
    )


class Resident:
    """This process's resident memory, now or, as a context, its peak: looked at every few milliseconds in a thread.

    :ivar peak: MiB, of the last or present context.
    """

    INTERVAL = 5e-3

    def __init__(self) -> None:
        self._process = load_extra("psutil", "bench").Process()
        self.peak = 0.0

    def now(self) -> float:
        """MiB, once what nobody holds is gone."""
        gc.collect()
        return self.read()

    def read(self) -> float:
        """MiB, as it is."""
        resident: int = self._process.memory_info().rss
        return resident / MEBI

    def __enter__(self) -> Self:
        self.peak = self.read()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="aphoton memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.INTERVAL):
            self.peak = max(self.peak, self.read())
