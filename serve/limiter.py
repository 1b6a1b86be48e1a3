"""`Limiter`: how much one API key may ask for."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aphoton_serve.errors import ApiError

__all__ = ["Limiter"]


class Limiter:
    """Requests at the same time and requests per minute, for each key on its own.

    A minute's requests may come in one burst; then they come back evenly (a token bucket). Holds one entry for each
    name that it has seen, and names are those of the key ring.
    """

    def __init__(
        self, *, concurrent: int | None, per_minute: int | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._concurrent = concurrent
        self._per_minute = per_minute
        self._now = now
        self._running: dict[str, int] = {}
        self._buckets: dict[str, tuple[float, float]] = {}
        """(requests left, as of when), by name."""

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """A place for one request, as long as the context lasts.

        :raises ApiError: 429, when there is none.
        """
        running = self._running.get(name, 0)
        if self._concurrent is not None and running >= self._concurrent:
            raise _refusal(f"this key has {running} requests running, and may have {self._concurrent}", 1)
        self._count(name)
        self._running[name] = running + 1
        try:
            yield
        finally:
            left = self._running[name] - 1
            if left:
                self._running[name] = left
            else:
                del self._running[name]

    def _count(self, name: str) -> None:
        if self._per_minute is None:
            return
        rate, now = self._per_minute / 60, self._now()
        left, since = self._buckets.get(name, (float(self._per_minute), now))
        left = min(self._per_minute, left + (now - since) * rate)
        if left < 1:
            self._buckets[name] = (left, now)
            raise _refusal(f"this key may make {self._per_minute} requests a minute", math.ceil((1 - left) / rate))
        self._buckets[name] = (left - 1, now)


def _refusal(message: str, seconds: int) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=seconds)
