"""`Load`: requests of all kinds on one engine, as many as it takes or at a given rate, and what came of them."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field

import numpy as np

from aphoton import AphotonError, CompletionStream, Engine, EngineClosed, EngineDead, Stats
from aphoton.cli.figures import Spread
from aphoton.cli.mix import Ask, mixed
from aphoton.cli.workload import Workload

__all__ = ["Load", "Seen", "Times"]

GENERATIONS = 3
"""Requests of a calibration, at least, by stream: those of the first generation do not count."""
FIRST_GUESS = 0.05
"""Seconds that a request takes, as long as none has ended."""
PATIENCE = 10.0
"""Seconds that the engine may take to let everything go."""
DIFFERENT = 20
"""Failures that are told apart."""


class Times:
    """Any number of times, in a histogram: what is noted of a long run must not look like growth of the engine."""

    SHORTEST = 1e-6
    STEP = math.log(1.02)
    BINS = 1100

    def __init__(self) -> None:
        self._counts = [0] * self.BINS
        self._max = 0.0

    def add(self, seconds: float) -> None:
        place = int(math.log(max(seconds, self.SHORTEST) / self.SHORTEST) / self.STEP)
        self._counts[min(place, self.BINS - 1)] += 1
        self._max = max(self._max, seconds)

    def spread(self) -> Spread | None:
        """To a percent; None when there are none."""
        totals = np.cumsum(self._counts)
        if not totals[-1]:
            return None
        places = np.searchsorted(totals, np.array((0.5, 0.99)) * totals[-1])
        p50, p99 = np.minimum(self.SHORTEST * np.exp((places + 0.5) * self.STEP), self._max) * 1e3
        return Spread(p50=float(p50), p99=float(p99), max=self._max * 1e3)


@dataclass(slots=True, kw_only=True)
class Seen:
    """What has come of requests so far."""

    failed: Counter[str]
    requests: int = 0
    finished: int = 0
    cancelled: Counter[str] = field(default_factory=Counter)
    unseen: int = 0
    ttft: Times = field(default_factory=Times)
    itl: Times = field(default_factory=Times)
    most_running: int = 0
    most_waiting: int = 0


@dataclass(slots=True)
class _Answer:
    """What has come of one request."""

    tokens: int = 0
    logprobs: int = 0
    reason: str | None = None


class Load:
    """Requests on one engine.

    :ivar over: the engine has died, and nothing more can come of it.
    :ivar died: of what, once `settle` has asked it.
    """

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self._engine = engine
        self._asks = mixed(workload, engine.limits.vocab_size)
        self._seed = workload.seed
        self._usual = 0.0  # seconds that a request takes
        self._closing: set[asyncio.Task[None]] = set()
        self.over = False
        self.died: str | None = None
        self.seen = Seen(failed=Counter())

    async def calibrate(self, concurrency: int, seconds: float) -> float:
        """Requests a second that end while there are always ``concurrency`` of them."""
        begin = time.perf_counter()
        ends: list[float] = []

        def enough() -> bool:
            return len(ends) >= GENERATIONS * concurrency and ends[-1] - begin >= seconds

        async def client() -> None:
            while not enough() and not self.over:
                await self.request(next(self._asks))
                if not enough():  # else some streams have nothing to do any more
                    ends.append(time.perf_counter())

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        if self.over:
            return 0.0
        # They were all young together at first.
        return (len(ends) - concurrency) / (ends[-1] - ends[concurrency - 1])

    async def send(self, rate: float, seconds: float, beside: Awaitable[None]) -> None:
        """Send requests for so long, at random moments, and wait until they have ended.

        :param rate: requests a second on average.
        :param beside: awaited at the same time, if the engine lives.
        """
        random = np.random.default_rng((self._seed, 1))
        begin = due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            watching = asyncio.ensure_future(beside)
            try:
                while due < begin + seconds and not self.over:
                    await asyncio.sleep(due - time.perf_counter())
                    group.create_task(self.request(next(self._asks)))
                    self._look()
                    due += random.exponential(1 / rate)
                if not self.over:
                    await watching
            finally:
                watching.cancel()

    async def settle(self) -> Stats | None:
        """What the engine holds when it has had the time to let go; None when it is dead."""
        deadline = time.perf_counter() + PATIENCE
        try:
            while True:
                stats = self._engine.stats()
                held = stats.running or stats.waiting or stats.zombies or stats.pages_used
                if not held or time.perf_counter() > deadline:
                    return stats
                await asyncio.sleep(1e-3)
        except AphotonError as error:
            self.died = str(error)
            return None

    def tokens(self) -> int:
        """What the engine has given to requests."""
        try:
            return self._engine.stats().tokens
        except AphotonError:
            return 0

    async def request(self, ask: Ask) -> None:
        """Run one to its end, or give it up, and count it. Its error is counted too, and not raised."""
        self.seen.requests += 1
        answer, begin = _Answer(), time.perf_counter()
        try:
            given_up = await self._given_up(ask, answer)
        except Exception as error:
            self._fail(error)
            return
        if given_up and answer.reason not in ("stop", "length"):
            self.seen.cancelled[ask.way or ""] += 1
            self.seen.unseen += not answer.tokens
            return
        wrong = _wrong(ask, answer)
        if wrong is not None:
            self._fail(AssertionError(wrong))
            return
        self.seen.finished += 1
        took = time.perf_counter() - begin
        self._usual = took if not self._usual else 0.95 * self._usual + 0.05 * took

    async def _given_up(self, ask: Ask, answer: _Answer) -> bool:
        """Read the request's stream into ``answer``. Returns whether it was given up before it ended by itself."""
        stream = self._engine.stream(ask.prompt, ask.params)
        delay = ask.moment * (self._usual or FIRST_GUESS)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        given_up = False

        def give_up() -> None:
            nonlocal given_up
            given_up = True
            if ask.way == "task":
                task.cancel()
            else:
                closing = loop.create_task(stream.aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

        timer = None if ask.way in (None, "time-out") else loop.call_later(delay, give_up)
        try:
            async with asyncio.timeout(delay if ask.way == "time-out" else None) as limit:
                await self._read(stream, answer)
        except TimeoutError:
            if not limit.expired():
                raise
            given_up = True
        except asyncio.CancelledError:
            if ask.way != "task" or not given_up or task.uncancel():
                raise  # somebody else's: the command is interrupted
        finally:
            if timer is not None:
                timer.cancel()
        return given_up

    async def _read(self, stream: CompletionStream, answer: _Answer) -> None:
        last = time.perf_counter()
        async for piece in stream:
            now = time.perf_counter()
            if piece.token_ids:
                (self.seen.itl if answer.tokens else self.seen.ttft).add(now - last)
                if not answer.tokens:
                    self._look()
                last = now
            answer.tokens += len(piece.token_ids)
            answer.logprobs += len(piece.logprobs or ())
            answer.reason = piece.finish_reason

    def _look(self) -> None:
        with contextlib.suppress(AphotonError):  # it has died: each request will say so
            stats, seen = self._engine.stats(), self.seen
            seen.most_running = max(seen.most_running, stats.running)
            seen.most_waiting = max(seen.most_waiting, stats.waiting)

    def _fail(self, error: Exception) -> None:
        self.over |= isinstance(error, EngineDead | EngineClosed)
        text = f"{type(error).__name__}: {error}"
        self.seen.failed[text if text in self.seen.failed or len(self.seen.failed) < DIFFERENT else "others"] += 1


def _wrong(ask: Ask, answer: _Answer) -> str | None:
    """What cannot be, of a request that has ended by itself."""
    longest, least = ask.params.max_tokens or 0, max(ask.params.min_tokens, 1)
    if answer.reason not in ("stop", "length"):
        return f"a request ended with {answer.reason}"
    if not least <= answer.tokens <= longest or (answer.reason == "length" and answer.tokens < longest):
        return f"{answer.tokens} tokens of {least} to {longest}, ended by {answer.reason}"
    if answer.logprobs != (0 if ask.params.logprobs is None else answer.tokens):
        return f"{answer.logprobs} log-probabilities of {answer.tokens} tokens"
    return None
