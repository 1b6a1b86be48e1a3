"""`draw`: recorded ticks as a picture."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from aphoton.cli.missing import load_extra
from aphoton.observe import HOST_PHASES, Phase, Recording, Span

__all__ = ["draw", "load_matplotlib"]

COLORS: dict[Phase, str] = {
    "launch": "#2a6fb0",
    "wait": "#dfe3e8",
    "commit": "#e08214",
    "sample": "#4d9a3f",
    "device": "#5d6b7a",
    "idle": "#d7191c",
}
OTHER_SLOT = "#8695a6"
"""The device's work on every second step: neighbours can be told apart."""
MEANINGS: dict[Phase, str] = {
    "launch": "launch t+1",
    "wait": "await t (the loop is the app's)",
    "commit": "commit t",
    "sample": "sample t+1",
    "device": "forward and sampling",
    "idle": "device idle",
}
HOST, DEVICE = 1.0, 0.0
HALF = 0.3
"""Half the height of a track."""
STEPS = 6
"""Steps in a picture whose window is not given."""


def load_matplotlib() -> Any:
    """The module that draws, imported when needed.

    :raises MissingExtra: when it is not installed.
    """
    return load_extra("matplotlib.figure", "plot")


def draw(recordings: Mapping[str, Recording], file: Path, *, window: float | None = None) -> None:
    """Draw the last ticks in which all rows decode, one recording below the other on the same scale of time.

    :param recordings: by name, with at least one step each.
    :param file: a PNG.
    :param window: seconds. None: a few steps.
    """
    seconds = window or STEPS * max(_period(recording) for recording in recordings.values())
    figure = load_matplotlib().Figure(figsize=(14, 0.9 + 2.3 * len(recordings)), layout="constrained")
    panels = figure.subplots(len(recordings), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, recording) in zip(panels, recordings.items(), strict=True):
        _panel(axes, name, recording, seconds)
    panels[-1].set_xlabel("time, ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(file, format="png", dpi=110)


def _full(recording: Recording) -> list[Span]:
    """The device's work on steps that only decode, with all rows there; all its work when there are none."""
    steps = [span for span in recording.device if span.tokens == span.rows] or recording.device
    widest = max(span.rows for span in steps)
    return [span for span in steps if span.rows == widest]


def _period(recording: Recording) -> float:
    steps = _full(recording)
    return median([b.begin - a.begin for a, b in pairwise(steps)] or [steps[0].end - steps[0].begin])


def _panel(axes: Any, name: str, recording: Recording, seconds: float) -> None:
    end = _full(recording)[-2:][0].end  # the last step has no next one to be launched beside it
    begin = end - seconds
    seen = [span for span in recording.spans if span.end > begin and span.begin < end]

    def bars(spans: Iterable[Span], track: float, color: str, label: str | None, **style: Any) -> None:
        axes.broken_barh(
            [((span.begin - begin) * 1e3, (span.end - span.begin) * 1e3) for span in spans],
            (track - HALF, 2 * HALF),
            facecolor=color,
            label=label,
            **style,
        )

    for phase in HOST_PHASES:
        # An edge in the bar's own colour: what is shorter than a pixel is seen all the same.
        edge = "none" if phase == "wait" else COLORS[phase]
        bars(_of(seen, phase), HOST, COLORS[phase], MEANINGS[phase], edgecolor=edge, linewidth=0.8)
    work = _of(seen, "device")
    for odd, color in ((0, COLORS["device"]), (1, OTHER_SLOT)):
        label = None if odd else MEANINGS["device"]
        bars([span for span in work if span.step % 2 == odd], DEVICE, color, label, edgecolor="none")
    idle = _of(seen, "idle")
    bars(idle, DEVICE, COLORS["idle"], MEANINGS["idle"], edgecolor=COLORS["idle"], linewidth=0.8)
    for span in idle:
        axes.axvspan(
            (span.begin - begin) * 1e3,
            (span.end - begin) * 1e3,
            color=COLORS["idle"],
            alpha=0.15,
            linewidth=0,
            zorder=0,
        )
    _label_steps(axes, work, begin, seconds)
    _connect(axes, seen, begin)

    axes.set_title(
        f"{name}: a step every {_period(recording) * 1e3:.3g} ms, the device idle {recording.idle_share:.1%}",
        loc="left",
        fontsize=10,
    )
    axes.set_xlim(0, seconds * 1e3)
    axes.set_ylim(DEVICE - 0.5, HOST + 0.5)
    axes.set_yticks([DEVICE, HOST], ["device", "host"])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _label_steps(axes: Any, work: list[Span], begin: float, seconds: float) -> None:
    for span in work:
        left, right = max(span.begin, begin), min(span.end, begin + seconds)
        if right - left > seconds / 25:
            rows = f"{span.rows} row{'s' if span.rows > 1 else ''}"
            middle = ((left + right) / 2 - begin) * 1e3
            axes.text(middle, DEVICE, f"step {span.step}\n{rows}", ha="center", va="center", color="white", fontsize=8)


def _connect(axes: Any, seen: list[Span], begin: float) -> None:
    """Thin lines from each launch down to its work, and from there up to its commit."""
    launches = {span.step: span.end for span in _of(seen, "launch")}
    commits = {span.step: span.begin for span in _of(seen, "commit")}
    for span in _of(seen, "device"):
        for host, device, color in (
            (launches.get(span.step), span.begin, COLORS["launch"]),
            (commits.get(span.step), span.end, COLORS["commit"]),
        ):
            if host is not None:
                times = [(host - begin) * 1e3, (device - begin) * 1e3]
                axes.plot(times, [HOST - HALF, DEVICE + HALF], color=color, linewidth=1, alpha=0.8, clip_on=True)


def _of(spans: Iterable[Span], phase: Phase) -> list[Span]:
    return [span for span in spans if span.phase == phase]
