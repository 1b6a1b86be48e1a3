"""What the engine tells of itself: `Stats` and the `Timeline` of its ticks."""

from aphoton.observe.stats import Stats
from aphoton.observe.timeline import Phase, Span, Timeline

__all__ = ["Phase", "Span", "Stats", "Timeline"]
