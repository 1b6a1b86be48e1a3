"""`Stats`: a snapshot of an engine."""

import msgspec

__all__ = ["Stats"]


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment. Counts since its start; times in seconds of its device's clock but for ``stalled``.

    :ivar running: sequences that hold a row and have not ended.
    :ivar waiting: requests that wait for a row.
    :ivar pages_free: pages that hold nothing.
    :ivar pages_cached: pages that no sequence holds, kept for their contents.
    :ivar pages_used: pages that sequences hold; ``pages_free + pages_cached + pages_used`` is all of them.
    :ivar zombies: sequences that have ended while a step that computes them is in flight.
    :ivar zombies_total: rows computed for a sequence that had ended by the commit, so for nothing.
    :ivar preemptions: times that a running sequence was set back for want of pages, to be computed anew.
    :ivar steps: steps committed.
    :ivar stalled: seconds of the machine's monotonic clock for which there has been something to do and no step has
        been committed; 0 when there is nothing. A step that never ends shows here.
    :ivar tokens: tokens given to requests.
    :ivar launch_time, wait_time, commit_time, sample_time: spent in each phase of the ticks; ``wait_time`` is the
        loop's own, for other tasks.
    :ivar device_busy: the device was working on steps.
    :ivar device_idle: it waited for the host between two steps of one busy spell.
    """

    running: int
    waiting: int
    pages_free: int
    pages_cached: int
    pages_used: int
    zombies: int
    zombies_total: int
    preemptions: int
    steps: int
    stalled: float
    tokens: int
    launch_time: float
    wait_time: float
    commit_time: float
    sample_time: float
    device_busy: float
    device_idle: float

    @property
    def device_idle_share(self) -> float:
        """The share of the busy spells in which the device waited for the host, 0 to 1."""
        total = self.device_busy + self.device_idle
        return self.device_idle / total if total else 0.0
