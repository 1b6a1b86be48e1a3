"""Events on the host's clock."""

from typing import Any

import pytest

from aphoton.device.cuda import clock
from aphoton.device.cuda.clock import DeviceClock, StepEvents


class Event:
    """At ``at`` milliseconds on the device's clock, when it is recorded."""

    device = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = Event.device

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


class Clocks:
    """The device's clock, and the host's, which may run at another speed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
        self.seconds, self.drift = 0.0, drift
        Event.device = 5000.0
        monkeypatch.setattr(clock.torch.cuda, "Event", Event)
        monkeypatch.setattr(clock.time, "perf_counter", lambda: 100.0 + self.seconds)

    def go(self, seconds: float) -> None:
        self.seconds += seconds
        Event.device += seconds * 1e3 * (1 + self.drift)


@pytest.mark.parametrize("drift", [0.0, 1e-4, -1e-4])
def test_intervals_stay_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
    clocks = Clocks(monkeypatch, drift)
    here = DeviceClock(None)  # type: ignore[arg-type]
    ring = [StepEvents() for _ in range(4)]
    for number in range(10_000):
        events = ring[number % 4]
        clocks.go(0.001)
        launched = 100.0 + clocks.seconds
        events.began.record()
        clocks.go(0.004)
        events.ended.record()
        true_end = 100.0 + clocks.seconds
        clocks.go(0.0001)
        began, ended = here.interval(events, launched)
        assert abs(began - launched) < 3e-4 and abs(ended - true_end) < 3e-4
