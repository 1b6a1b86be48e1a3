"""What the engine tells of itself: `Stats`, the `Timeline` of its ticks, and their `trace_events`."""

from aphoton.observe.recording import Counts, Recording, Tick
from aphoton.observe.stats import Stats
from aphoton.observe.timeline import HOST_PHASES, Phase, Span, Timeline
from aphoton.observe.trace import trace_events

__all__ = ["HOST_PHASES", "Counts", "Phase", "Recording", "Span", "Stats", "Tick", "Timeline", "trace_events"]
