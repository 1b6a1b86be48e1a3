"""What is noted of ticks: totals, idle gaps, turns."""

import pytest

from aphoton import Stats
from aphoton.observe import Recording, Span, Timeline, trace_events


def _stats(zombies_total: int = 0) -> Stats:
    return Stats(
        running=2, waiting=1, pages_free=0, pages_cached=0, pages_used=0, zombies=0, zombies_total=zombies_total,
        preemptions=0, steps=0, stalled=0, tokens=0, launch_time=0, wait_time=0, commit_time=0, sample_time=0,
        device_busy=3, device_idle=1,
    )  # fmt: skip


def test_idle_is_what_lies_between_two_steps_of_a_busy_spell() -> None:
    timeline = Timeline(keep=3)
    recording = Recording(timeline)
    assert recording.idle_share == 0
    timeline.add_device(1, 1.0, 2.0, 4, 9)
    timeline.add_device(2, 2.5, 3.0, 4, 4)
    timeline.add_device(3, 3.0, 3.5, 4, 4)
    timeline.rest()
    timeline.add_device(4, 9.0, 9.5, 1, 1)
    assert timeline.device_idle == timeline.totals["idle"] == 0.5
    assert timeline.totals["device"] == 2.5
    assert [span.step for span in timeline.spans] == [2, 3, 4]
    assert _stats().device_idle_share == 0.25
    assert recording.idle_share == 0.5 / 3


def test_a_recording_sees_all_from_then_on() -> None:
    timeline = Timeline(keep=1)
    timeline.add("launch", 1, 0.0, 0.1, 1, 1)
    zombies = 5
    recording = Recording(timeline, lambda: _stats(zombies))
    timeline.add("launch", 2, 0.1, 0.2, 1, 1)
    zombies = 7
    timeline.add("commit", 1, 0.2, 0.3, 1, 1)
    timeline.add("commit", 2, 0.3, 0.4, 1, 1)
    recording.stop()
    timeline.add("launch", 3, 0.5, 0.6, 1, 1)
    assert [(span.phase, span.step) for span in recording.spans] == [("launch", 2), ("commit", 1), ("commit", 2)]
    assert [(counts.time, counts.running, counts.waiting, counts.zombies) for counts in recording.counts] == [
        (0.3, 2, 1, 2),
        (0.4, 2, 1, 0),
    ]
    assert recording.seconds == pytest.approx(0.3)


BLOCKING = "launch 1, sample 1, wait 1, commit 1, launch 2, sample 2, wait 2, commit 2"
PIPELINED = (
    "launch 1, sample 1, launch 2, wait 1, commit 1, sample 2, launch 3, wait 2, commit 2, sample 3, wait 3, commit 3"
)


@pytest.mark.parametrize(("phases", "ticks"), [(BLOCKING, [4, 4]), (PIPELINED, [2, 4, 4, 2])])
def test_ticks(phases: str, ticks: list[int]) -> None:
    timeline = Timeline()
    recording = Recording(timeline)
    for time, (phase, step) in enumerate(part.split() for part in phases.split(", ")):
        timeline.add(phase, int(step), float(time), time + 1.0, 1, 1)  # type: ignore[arg-type]
    assert [len(tick.phases) for tick in recording.ticks] == ticks
    assert [tick.end for tick in recording.ticks][-1] == len(phases.split(", "))
    assert not recording.counts


def test_an_empty_recording_is_a_trace() -> None:
    document = trace_events({"nothing": Recording(Timeline())})
    assert {event["ph"] for event in document["traceEvents"]} == {"M"}


def test_times_are_whole_nanoseconds_from_the_first_span() -> None:
    timeline = Timeline()
    recording = Recording(timeline)
    timeline.add("launch", 1, 100.0000001, 100.0000004, 2, 3)
    timeline.add_device(1, 100.0000004, 100.0010004, 2, 3)
    events = {event["name"]: event for event in trace_events({"x": recording})["traceEvents"] if event["ph"] == "X"}
    assert (events["launch"]["ts"], events["launch"]["dur"]) == (0.0, 0.3)
    assert (events["tick 1"]["ts"], events["tick 1"]["dur"]) == (0.0, 0.3)
    assert (events["step 1"]["ts"], events["step 1"]["dur"]) == (0.3, 1000.0)
    assert events["step 1"]["args"] == {"step": 1, "rows": 2, "tokens": 3}
    assert isinstance(recording.spans[0], Span)
