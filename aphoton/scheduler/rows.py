"""`Rows`: what the scheduler knows of each running sequence, as arrays over rows."""

import numpy as np
from numpy.typing import NDArray

from aphoton.kv import CachedPage
from aphoton.scheduler.sequence import Sequence

__all__ = ["Rows"]

STOPS = 4
"""End tokens that each row has place for, always."""


class Rows:
    """The places in the batch: 1 to ``count``; row 0 is padding. A sequence keeps its row until it ends or is
    preempted.

    Arrays over rows, so that a tick's work per row is numpy's and not Python's.

    :ivar sequences: who has the row.
    :ivar active: [r] the row is taken and its sequence has not ended, nor been preempted.
    :ivar decoding: [r] active, and the last part of what it began with has been launched: it goes on token by token.
    :ivar prefilling: those who are active and not decoding.
    :ivar preempted: [r] its sequence waits again, and the row is held by steps in flight only.
    :ivar refs: [r] steps in flight that compute the row; its sequence's in-flight references, 0 to 2.
    :ivar context: [r] tokens whose KV the launches so far have written, or that were cached.
    :ivar begun: [r] tokens that it began with, for which it has pages.
    :ivar reach: [r] tokens whose KV it needs when it runs to its end.
    :ivar launched: [r] tokens whose sampling has been launched, here or before a preemption.
    :ivar committed: [r] tokens that have reached the sequence.
    :ivar limit: [r] tokens it may generate.
    :ivar min_tokens: [r] tokens before an end counts.
    :ivar watched: [r] it has stop strings.
    :ivar late: [r] its sampling waits for the host: it has a masker or a processor.
    :ivar lates: rows that were taken and are late.
    :ivar stop_ids: [r, k] token ids that end it, filled up with -1; no wider for long than those who run need.
    :ivar known: the tokens that it began with: the prompt, and after a preemption the output.
    :ivar scored: log-probabilities of its prompt that had come when it got the row.
    :ivar paths: its pages that are in the prefix cache and that it uses.
    :ivar growing: whether what it computes of ``known`` goes to the prefix cache, behind its path.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        size = count + 1
        self.sequences: list[Sequence | None] = [None] * size
        self.prefilling: dict[Sequence, None] = {}
        self.active = np.zeros(size, np.bool_)
        self.decoding = np.zeros(size, np.bool_)
        self.preempted = np.zeros(size, np.bool_)
        self.watched = np.zeros(size, np.bool_)
        self.late = np.zeros(size, np.bool_)
        self.refs = np.zeros(size, np.int32)
        self.context = np.zeros(size, np.int32)
        self.begun = np.zeros(size, np.int32)
        self.reach = np.zeros(size, np.int32)
        self.launched = np.zeros(size, np.int32)
        self.committed = np.zeros(size, np.int32)
        self.limit = np.zeros(size, np.int32)
        self.min_tokens = np.zeros(size, np.int32)
        self.stop_ids = np.full((size, STOPS), -1, np.int32)
        self._many: set[int] = set()  # rows with more than `STOPS` of them
        self.lates = 0
        self.known: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * size
        self.scored = [0] * size
        self.paths: list[list[CachedPage]] = [[] for _ in range(size)]
        self.growing = [False] * size
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
        if len(stops) > STOPS:
            self._many.add(row)
        if len(stops) > self.stop_ids.shape[1]:
            wider = np.full((self.count + 1, len(stops)), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops
        self.sequences[row] = sequence
        self.prefilling[sequence] = None
        self.active[row] = True
        self.decoding[row] = self.preempted[row] = False
        self.watched[row] = sequence.watch is not None
        late = sequence.masker is not None or sequence.processor is not None
        self.late[row] = late
        self.lates += late
        self.refs[row] = self.context[row] = 0
        self.launched[row] = self.committed[row] = len(sequence.output)
        self.begun[row] = len(sequence.known)
        self.reach[row] = len(sequence.prompt) + max(sequence.limit, 1) - 1
        self.limit[row] = sequence.limit
        self.min_tokens[row] = sequence.min_tokens
        self.known[row] = sequence.known
        self.scored[row] = len(sequence.prompt_scores)
        sequence.row = row
        return row

    def decode(self, row: int) -> None:
        """All of what it began with has been launched."""
        self.decoding[row] = True
        del self.prefilling[self.holder(row)]

    def deactivate(self, row: int) -> None:
        """Launch nothing more for it."""
        self.prefilling.pop(self.holder(row), None)
        self.active[row] = self.decoding[row] = False

    def release(self, row: int) -> None:
        """Take the row back. No step in flight may compute it any more."""
        assert self.refs[row] == 0 and not self.active[row] and row > 0, row
        self.holder(row).row = 0
        self.sequences[row] = None
        self.preempted[row] = False
        self.lates -= int(self.late[row])
        self.late[row] = False
        self.known[row] = self.known[0]
        if row in self._many:
            self._many.remove(row)
            if not self._many:
                self.stop_ids = self.stop_ids[:, :STOPS].copy()
        self._free.append(row)
