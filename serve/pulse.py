"""`Pulse`: whether an engine that has something to do still does it."""

from collections.abc import Callable

from aphoton import AphotonError, Stats

__all__ = ["Pulse"]


class Pulse:
    """Sees that an engine works and finishes no step. Needs looking now and then: `look` as often as you like.

    :param stats: the engine's.
    :param limit: seconds that a step may take.
    """

    def __init__(self, stats: Callable[[], Stats], limit: float, now: Callable[[], float]) -> None:
        self._stats = stats
        self._limit = limit
        self._now = now
        self._steps = -1
        self._since = now()

    def look(self) -> str | None:
        """What is wrong; None when nothing is."""
        try:
            stats = self._stats()
        except AphotonError as error:  # closed, or dead
            return type(error).__name__
        busy = stats.running or stats.waiting or stats.zombies
        if not busy or stats.steps != self._steps:
            self._steps, self._since = stats.steps, self._now()
            return None
        stuck = self._now() - self._since
        if stuck <= self._limit:
            return None
        return f"no step has finished for {stuck:.1f} s, with {stats.running} running and {stats.waiting} waiting"
