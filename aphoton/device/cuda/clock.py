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

    def interval(self, events: StepEvents, launched_at: float) -> tuple[float, float]:
        """When the step began and ended. Both events have happened.

        :param launched_at: `time.perf_counter` before anything of it was enqueued: it cannot have begun before.
        """
        began = self._time + self._last.elapsed_time(events.began) * 1e-3
        ended = began + events.began.elapsed_time(events.ended) * 1e-3
        # The clocks drift apart, by milliseconds an hour: what cannot be says how far they are.
        early = launched_at - began
        late = ended - time.perf_counter()
        if early > 0:
            began, ended = began + early, ended + early
        elif late > 0:
            began, ended = began - late, ended - late
        self._last, self._time = events.ended, ended
        return began, ended
