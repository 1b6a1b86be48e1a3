"""`Recording`: all of an engine's ticks, from one moment on."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from aphoton.observe.stats import Stats
from aphoton.observe.timeline import HOST_PHASES, Span, Timeline

__all__ = ["Counts", "Recording", "Tick"]


class Counts(NamedTuple):
    """Sequences at one moment, in seconds on the device's clock.

    :ivar zombies: rows of the commit just done that were computed for nothing.
    """

    time: float
    running: int
    waiting: int
    zombies: int


class Tick(NamedTuple):
    """One turn of the pipeline: the host's phases, in order."""

    phases: tuple[Span, ...]

    @property
    def begin(self) -> float:
        return self.phases[0].begin

    @property
    def end(self) -> float:
        return self.phases[-1].end


class Recording:
    """Every span of a timeline, and the sequences at each commit, from its making until `stop`.

    :ivar spans: as they were noted.
    :ivar counts: one entry per commit, if they are counted.
    """

    def __init__(self, timeline: Timeline, stats: Callable[[], Stats] | None = None) -> None:
        """:param stats: a snapshot of the timeline's engine, read at each commit. None: count nothing."""
        self.spans: list[Span] = []
        self.counts: list[Counts] = []
        self._timeline = timeline
        self._stats = stats
        self._zombies = 0 if stats is None else stats().zombies_total
        timeline.on_span = self._note

    def stop(self) -> None:
        """Record no more."""
        self._timeline.on_span = None

    @property
    def seconds(self) -> float:
        """From the first span's begin to the last one's end."""
        return max(span.end for span in self.spans) - min(span.begin for span in self.spans)

    @property
    def device(self) -> list[Span]:
        """The device's work on each step, in order."""
        return [span for span in self.spans if span.phase == "device"]

    @property
    def idle(self) -> list[Span]:
        """The gaps between them in which the device waited for the host."""
        return [span for span in self.spans if span.phase == "idle"]

    @property
    def idle_share(self) -> float:
        """The share of the busy spells in which the device waited for the host, 0 to 1."""
        busy, idle = (sum(span.end - span.begin for span in spans) for spans in (self.device, self.idle))
        return idle / (busy + idle) if busy + idle else 0.0

    @property
    def ticks(self) -> list[Tick]:
        """The host's phases, turn by turn."""
        return list(_ticks(span for span in self.spans if span.phase in HOST_PHASES))

    def _note(self, span: Span) -> None:
        self.spans.append(span)
        if span.phase == "commit" and self._stats is not None:
            stats = self._stats()
            zombies, self._zombies = stats.zombies_total - self._zombies, stats.zombies_total
            self.counts.append(Counts(span.end, stats.running, stats.waiting, zombies))


def _ticks(phases: Iterable[Span]) -> Iterable[Tick]:
    """A turn begins with a launch or, when nothing is left to launch, with waiting for what is in flight."""
    tick: list[Span] = []
    for span in phases:
        committed = any(phase.phase == "commit" for phase in tick)
        if tick and (span.phase == "launch" or (span.phase == "wait" and committed)):
            yield Tick(tuple(tick))
            tick = []
        tick.append(span)
    if tick:
        yield Tick(tuple(tick))
