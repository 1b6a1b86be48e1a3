"""`draw`: a ramp as a picture."""

from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from aphoton.cli.plot import load_matplotlib
from aphoton_serve.ramp import Course

__all__ = ["draw"]

LOAD, RUNNING, STARTING, TTFT, FAILED = "#5d6b7a", "#2a6fb0", "#e08214", "#4d9a3f", "#d7191c"
BINS = 40
"""Of the medians of TTFT."""


def draw(course: Course, file: Path) -> None:
    """Draw load, replicas and TTFT, one below the other, over time.

    :param file: a PNG.
    """
    figure = load_matplotlib().Figure(figsize=(9, 6), layout="constrained")
    load, replicas, ttft = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 3))
    times = [look.at for look in course.looks]
    load.step(times, [look.streams for look in course.looks], where="post", color=LOAD)
    load.set_ylabel("streams in flight")

    running = [look.running for look in course.looks]
    there = [look.running + look.starting for look in course.looks]
    replicas.fill_between(times, running, step="post", color=RUNNING, label="running")
    replicas.fill_between(times, running, there, step="post", color=STARTING, label="starting")
    replicas.set_ylabel("replicas")
    replicas.set_yticks(range(max(there, default=1) + 1))
    replicas.legend(loc="upper left", frameon=False)

    answered = [(one.at, one.ttft) for one in course.arrivals if one.ttft is not None]
    ttft.scatter(*_columns(answered), s=6, color=TTFT, alpha=0.4, linewidths=0, label="one request")
    ttft.plot(*_columns(_medians(answered)), color=TTFT, label="median")
    for number, one in enumerate(one for one in course.arrivals if one.error is not None):
        ttft.axvline(one.at, color=FAILED, label=None if number else "failed")
    ttft.set_yscale("log")
    ttft.set_ylabel("TTFT, s")
    ttft.set_xlabel("time, s")
    ttft.legend(loc="upper left", frameon=False)

    for axes in (load, replicas, ttft):
        _bound(axes, course)
    figure.savefig(file, format="png", dpi=80)


def _medians(answered: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Over stretches of equal length, by when requests were sent."""
    if not answered:
        return []
    width = max(at for at, _ in answered) / BINS or 1.0
    bins: dict[int, list[float]] = {}
    for at, seconds in answered:
        bins.setdefault(int(at / width), []).append(seconds)
    return [((number + 0.5) * width, median(bins[number])) for number in sorted(bins)]


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _bound(axes: Any, course: Course) -> None:
    """Show where the stages begin, and no box."""
    for begin, _ in pairwise(accumulate([0.0] + [course.stage] * len(course.clients))):
        axes.axvline(begin, color="#dfe3e8", linewidth=1, zorder=0)
    axes.set_xlim(0)
    if axes.get_yscale() == "linear":
        axes.set_ylim(0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
