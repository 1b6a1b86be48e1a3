"""`PacedBackend`: engines whose streams send no more often than it pays to send to another process."""

import asyncio
import time
from typing import Any, Self

from aphoton_serve.backend import Job, Part, PartStream
from aphoton_serve.local import LocalBackend

__all__ = ["PacedBackend", "PacedStream", "Pacer"]


class Pacer:
    """How often each of some streams may send, which all share one process.

    A message between actors of Ray takes the processes that pass it on about as long as it takes an engine to make ten
    tokens. So a stream among many sends fewer and longer messages.

    :param shortest: seconds between two messages of a stream that is alone.
    :param longest: seconds, however many there are: it goes before ``rate``.
    :param rate: messages a second that all streams together aim at.
    """

    def __init__(self, shortest: float = 0.02, longest: float = 0.2, rate: float = 250.0) -> None:
        self.running = 0
        self._shortest = shortest
        self._longest = longest
        self._rate = rate

    @property
    def interval(self) -> float:
        """Seconds between two messages of a stream, as of now."""
        return min(self._longest, max(self._shortest, self.running / self._rate))


class PacedStream:
    """The parts of a stream: the first of each answer at once, then with a pause between.

    While it pauses what comes gathers in the engine's own stream, and is one part.
    """

    def __init__(self, stream: PartStream, job: Job, pacer: Pacer) -> None:
        self._stream = stream
        self._pacer = pacer
        self._live = set(range(job.params.n))
        self._told: set[int] = set()
        self._sent = time.monotonic()
        self._counted = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        if not self._counted:
            self._counted = True
            self._pacer.running += 1
        if self._live and self._live <= self._told:  # each answer has told something
            await asyncio.sleep(max(0.0, self._sent + self._pacer.interval - time.monotonic()))
            self._told.clear()
            self._sent = time.monotonic()
        part = await anext(self._stream)
        self._told.add(part.index)
        if part.finish_reason is not None:
            self._live.discard(part.index)
        return part

    async def aclose(self) -> None:
        if self._counted:
            self._counted = False
            self._pacer.running -= 1
        await self._stream.aclose()


class PacedBackend(LocalBackend):
    """Engines in this process, for clients that are behind another one."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """As `LocalBackend`."""
        super().__init__(*arguments, **settings)
        self._pacer = Pacer()

    def stream(self, model: str, job: Job) -> PartStream:
        return PacedStream(super().stream(model, job), job, self._pacer)
