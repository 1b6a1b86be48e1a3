"""`trace_events`: recorded ticks in the Trace Event format, which Perfetto and chrome://tracing open."""

from collections.abc import Iterator, Mapping
from typing import Any

from aphoton.observe.recording import Recording, Tick
from aphoton.observe.timeline import Span

__all__ = ["trace_events"]

HOST, DEVICE = 1, 2
"""Threads of a process in the trace: each recording is a process."""


def trace_events(recordings: Mapping[str, Recording]) -> dict[str, Any]:
    """The ticks of each recording, under its name, as a JSON object.

    Host: each tick around its phases. Device: its work on each step, and the gaps between. Counters: rows of each
    step; sequences that run and that wait; rows computed for nothing. Time begins at each recording's first span.
    The format: "Trace Event Format", Google, 2016; times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (name, recording) in enumerate(recordings.items(), 1):
        events += _names(process, name)
        if recording.spans:
            events += _events(process, recording)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for thread, called in ((HOST, "host"), (DEVICE, "device")):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": called}}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _events(process: int, recording: Recording) -> Iterator[dict[str, Any]]:
    zero = min(span.begin for span in recording.spans)

    def micro(time: float) -> float:
        # Whole nanoseconds: what begins where another ends does so after rounding, too.
        return round((time - zero) * 1e9) / 1e3

    def slice_(thread: int, name: str, category: str, of: Span | Tick, args: dict[str, Any]) -> dict[str, Any]:
        begin, end = micro(of.begin), micro(of.end)
        return {
            "ph": "X",
            "pid": process,
            "tid": thread,
            "name": name,
            "cat": category,
            "ts": begin,
            "dur": round(end - begin, 3),
            "args": args,
        }

    def counter(time: float, name: str, values: dict[str, int]) -> dict[str, Any]:
        return {"ph": "C", "pid": process, "name": name, "ts": micro(time), "args": values}

    for number, tick in enumerate(recording.ticks, 1):
        yield slice_(HOST, f"tick {number}", "tick", tick, {})
        for span in tick.phases:
            yield slice_(HOST, span.phase, span.phase, span, _step(span))
    for span in recording.device:
        yield slice_(DEVICE, f"step {span.step}", "device", span, _step(span))
        yield counter(span.begin, "rows", {"rows": span.rows})
    for span in recording.idle:
        yield slice_(DEVICE, "idle", "idle", span, {"before step": span.step})
    for counts in recording.counts:
        yield counter(counts.time, "sequences", {"running": counts.running, "waiting": counts.waiting})
        yield counter(counts.time, "zombies", {"zombies": counts.zombies})


def _step(span: Span) -> dict[str, Any]:
    return {"step": span.step, "rows": span.rows, "tokens": span.tokens}
