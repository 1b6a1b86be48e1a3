"""`Rows`: what the scheduler knows of each running sequence, as arrays over rows."""

import numpy as np

from aphoton.scheduler.sequence import Sequence

__all__ = ["Rows"]


class Rows:
    """The places in the batch: 1 to ``count``; row 0 is padding. A sequence keeps its row for life.

    Arrays over rows, so that a tick's work per row is numpy's and not Python's.

    :ivar sequences: who has the row.
    :ivar active: [r] the row is taken and its sequence has not ended.
    :ivar refs: [r] steps in flight that compute the row; its sequence's in-flight references, 0 to 2.
    :ivar context: [r] tokens whose KV the launches so far have written.
    :ivar launched: [r] tokens whose sampling has been launched.
    :ivar committed: [r] tokens that have reached the sequence.
    :ivar limit: [r] tokens it may generate.
    :ivar min_tokens: [r] tokens before an end counts.
    :ivar reserved: [r] pages promised to it that it has not taken.
    :ivar watched: [r] it has stop strings.
    :ivar stop_ids: [r, k] token ids that end it, filled up with -1.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        size = count + 1
        self.sequences: list[Sequence | None] = [None] * size
        self.active = np.zeros(size, np.bool_)
        self.watched = np.zeros(size, np.bool_)
        self.refs = np.zeros(size, np.int32)
        self.context = np.zeros(size, np.int32)
        self.launched = np.zeros(size, np.int32)
        self.committed = np.zeros(size, np.int32)
        self.limit = np.zeros(size, np.int32)
        self.min_tokens = np.zeros(size, np.int32)
        self.reserved = np.zeros(size, np.int32)
        self.stop_ids = np.full((size, 4), -1, np.int32)
        self._free = list(range(count, 0, -1))

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def holder(self, row: int) -> Sequence:
        """Who has ``row``, which is taken."""
        sequence = self.sequences[row]
        assert sequence is not None, row
        return sequence

    def assign(self, sequence: Sequence) -> int:
        """Give ``sequence`` a free row."""
        row = self._free.pop()
        stops = sorted(sequence.stop_ids)
        if len(stops) > self.stop_ids.shape[1]:
            wider = np.full((self.count + 1, len(stops)), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops
        self.sequences[row] = sequence
        self.active[row] = True
        self.watched[row] = sequence.watch is not None
        self.refs[row] = self.context[row] = self.launched[row] = self.committed[row] = 0
        self.limit[row] = sequence.limit
        self.min_tokens[row] = sequence.min_tokens
        sequence.row = row
        return row

    def release(self, row: int) -> None:
        """Take the row back. No step in flight may compute it any more."""
        assert self.refs[row] == 0 and not self.active[row] and row > 0, row
        self.holder(row).row = 0
        self.sequences[row] = None
        self._free.append(row)
