"""`Timeline`: when the host and the device did what, tick by tick."""

from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

__all__ = ["HOST_PHASES", "Phase", "Span", "Timeline"]

Phase = Literal["launch", "wait", "commit", "sample", "device", "idle"]

HOST_PHASES: tuple[Phase, ...] = ("launch", "wait", "commit", "sample")


class Span(NamedTuple):
    """One phase of one step. Times in seconds on the device's clock.

    :ivar phase: one of the host's, ``device`` for its work on the step, or ``idle`` for the gap before that work.
    :ivar step: number of the step, from 1.
    :ivar rows: rows of the step.
    :ivar tokens: tokens that its forward fed.
    """

    phase: Phase
    step: int
    begin: float
    end: float
    rows: int
    tokens: int


class Timeline:
    """The last spans, and the totals of all.

    :ivar spans: the newest ``keep`` spans, oldest first, as they were noted: a device span once its step is committed.
    :ivar on_span: called with each span as it is noted, in the tick: it must be quick.
    """

    def __init__(self, keep: int = 4096) -> None:
        self.spans: deque[Span] = deque(maxlen=keep)
        self.on_span: Callable[[Span], None] | None = None
        self.totals: dict[Phase, float] = dict.fromkeys((*HOST_PHASES, "device", "idle"), 0.0)
        self._device_free: float | None = None

    @property
    def device_idle(self) -> float:
        """Seconds that the device waited for the host between two steps of one busy spell."""
        return self.totals["idle"]

    def add(self, phase: Phase, step: int, begin: float, end: float, rows: int, tokens: int) -> None:
        """Note a phase of a step."""
        self.totals[phase] += end - begin
        span = Span(phase, step, begin, end, rows, tokens)
        self.spans.append(span)
        if self.on_span is not None:
            self.on_span(span)

    def add_device(self, step: int, begin: float, end: float, rows: int, tokens: int) -> None:
        """Note the device's work on a step. The gap before it counts as idle, unless `rest` was called in it."""
        if self._device_free is not None and begin > self._device_free:
            self.add("idle", step, self._device_free, begin, rows, tokens)
        self._device_free = end
        self.add("device", step, begin, end, rows, tokens)

    def rest(self) -> None:
        """The engine has nothing to do: the gap that begins now is nobody's fault."""
        self._device_free = None
