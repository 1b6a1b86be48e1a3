"""`Timeline`: when the host and the device did what, tick by tick."""

from collections import deque
from typing import Literal, NamedTuple

__all__ = ["Phase", "Span", "Timeline"]

Phase = Literal["launch", "wait", "commit", "sample", "device"]


class Span(NamedTuple):
    """One phase of one step. Times in seconds on the device's clock.

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

    :ivar spans: the newest ``keep`` spans, oldest first. The host's phases and ``device`` are in one list.
    """

    def __init__(self, keep: int = 4096) -> None:
        self.spans: deque[Span] = deque(maxlen=keep)
        self.totals: dict[Phase, float] = {"launch": 0.0, "wait": 0.0, "commit": 0.0, "sample": 0.0, "device": 0.0}
        self.device_idle = 0.0
        self._device_free: float | None = None

    def add(self, phase: Phase, step: int, begin: float, end: float, rows: int, tokens: int) -> None:
        """Note a phase of the host."""
        self.totals[phase] += end - begin
        self.spans.append(Span(phase, step, begin, end, rows, tokens))

    def add_device(self, step: int, begin: float, end: float, rows: int, tokens: int) -> None:
        """Note the device's work on a step. The gap before it counts as idle, unless `rest` came between."""
        if self._device_free is not None:
            self.device_idle += max(0.0, begin - self._device_free)
        self._device_free = end
        self.add("device", step, begin, end, rows, tokens)

    def rest(self) -> None:
        """The engine has nothing to do: the gap that begins now is nobody's fault."""
        self._device_free = None
