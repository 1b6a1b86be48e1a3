"""`DeviceClock`: CUDA events on the host's clock."""

import time

import torch

__all__ = ["DeviceClock", "StepEvents"]


class StepEvents:
    """The events of one step. Used again for the step four launches later."""

    def __init__(self) -> None:
        self.began = torch.cuda.Event(enable_timing=True)
        self.ended = torch.cuda.Event(enable_timing=True)
        self.sent = torch.cuda.Event()
        self.copied = torch.cuda.Event()


class DeviceClock:
    """Turns the events of steps, in their order, into seconds of `time.perf_counter`.

    Each interval is measured from the step before: an event's distance from one long ago has few digits left in the
    driver's float32.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record(stream)
        self._last.synchronize()
        self._time = time.perf_counter()

    def interval(self, events: StepEvents) -> tuple[float, float]:
        """When the step began and ended. Both events have happened."""
        began = self._time + self._last.elapsed_time(events.began) * 1e-3
        ended = began + events.began.elapsed_time(events.ended) * 1e-3
        late = ended - time.perf_counter()
        if late > 0:  # the clocks drift, by microseconds an hour
            began, ended = began - late, ended - late
        self._last, self._time = events.ended, ended
        return began, ended
