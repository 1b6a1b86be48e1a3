"""`EventWait`: how a coroutine awaits a CUDA event."""

import asyncio
import queue
import threading
import time
from typing import Protocol

__all__ = ["STRATEGIES", "Event", "EventWait", "Executor", "Polling", "Thread", "Wait"]

TIMER = 2.0e-3
"""Seconds that are worth a timer of the event loop: it is a millisecond late as often as not."""
MARGIN = 1.2e-3
"""Seconds before the event at which the timer goes off."""


class Event(Protocol):
    """What of `torch.cuda.Event` is needed."""

    def query(self) -> bool:
        """Whether everything that was enqueued before it is done."""

    def synchronize(self) -> None:
        """Block until it is."""


class Wait(Protocol):
    """A way to await events, one at a time."""

    async def wait(self, event: Event, kind: object, since: float) -> None:
        """Return when ``event`` has happened; the loop gets at least one turn.

        :param kind: events of one kind take about as long.
        :param since: `time.perf_counter` when this one began to be next.
        """

    def learn(self, kind: object, took: float) -> None:
        """An event of this kind has happened ``took`` seconds after its ``since``, whenever it was noticed."""

    def close(self) -> None:
        """Let go of what it holds. Nobody awaits any more."""


class Polling:
    """The loop asks the event each time round: the quickest, and it keeps a processor busy."""

    async def wait(self, event: Event, kind: object, since: float) -> None:
        while True:
            await asyncio.sleep(0)
            if event.query():
                return

    def learn(self, kind: object, took: float) -> None:
        pass

    def close(self) -> None:
        pass


class EventWait:
    """Polls, after a timer where the event is far off. What an engine uses.

    Asking the event each time round the loop (`query`, then ``sleep(0)``) takes about 30 us from event to coroutine,
    where a thread that waits in the driver takes 140 us or more to hand over, a quarter of a short decode step; but it
    keeps a processor busy. So a wait of more than `TIMER` begins with a timer that is set `MARGIN` short of when
    events like this one have come before, and the polling is what is left. Everybody else on the loop runs in between
    either way. `aphoton bench --wakeup` compares it with the others.
    """

    def __init__(self) -> None:
        self._took: dict[object, float] = {}

    async def wait(self, event: Event, kind: object, since: float) -> None:
        known = self._took.get(kind)
        left = 0.0 if known is None else known - (time.perf_counter() - since)
        if left > TIMER:
            await asyncio.sleep(left - MARGIN)
        while True:
            await asyncio.sleep(0)
            if event.query():
                return

    def learn(self, kind: object, took: float) -> None:
        # Early is cheap, a little polling, and late is not: shorter counts at once, longer by and by.
        known = self._took.get(kind, took)
        self._took[kind] = min(took, 0.9 * known + 0.1 * took)

    def close(self) -> None:
        pass


class Executor:
    """Blocks in a thread of the loop's pool, for comparison."""

    async def wait(self, event: Event, kind: object, since: float) -> None:
        await asyncio.get_running_loop().run_in_executor(None, event.synchronize)

    def learn(self, kind: object, took: float) -> None:
        pass

    def close(self) -> None:
        pass


class Thread:
    """Blocks in a thread of its own, which wakes the loop through its self-pipe, for comparison."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[Event, asyncio.AbstractEventLoop, asyncio.Future[None]] | None]
        self._events = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aphoton events", daemon=True)
        self._thread.start()

    async def wait(self, event: Event, kind: object, since: float) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._events.put((event, loop, future))
        await future

    def learn(self, kind: object, took: float) -> None:
        pass

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (waiting := self._events.get()) is not None:
            event, loop, future = waiting
            event.synchronize()
            loop.call_soon_threadsafe(_done, future)


def _done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


STRATEGIES: dict[str, type[Wait]] = {
    "timer, then polling": EventWait,
    "polling": Polling,
    "thread": Thread,
    "executor": Executor,
}
"""What `aphoton bench --wakeup` compares."""
