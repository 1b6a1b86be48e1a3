"""`Waiting`: the sequences without a row, in the order in which they get one."""

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from aphoton.scheduler.sequence import Sequence

__all__ = ["Waiting"]

ORDER = attrgetter("order")


class Waiting:
    """Lower priorities first; inside one, the order of arrival, which a preempted sequence keeps.

    Arriving, leaving from the head and leaving from the middle cost the same however many wait.

    :ivar refused: the arrival of who found too little room last, and that room, in pages; until anybody leaves.
    """

    def __init__(self) -> None:
        self._fresh: dict[int, OrderedDict[Sequence, None]] = {}  # by priority, each in the order of arrival
        self._returned: list[Sequence] = []  # preempted, which are few, in the order of this class
        self._priorities: list[int] = []  # of ``_fresh``, lowest first
        self._count = 0
        self.refused: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """In order. Nobody may come or leave meanwhile."""
        if not self._returned and len(self._priorities) == 1:
            return iter(self._fresh[self._priorities[0]])
        fresh = (sequence for priority in self._priorities for sequence in self._fresh[priority])
        return heapq.merge(self._returned, fresh, key=ORDER) if self._returned else fresh

    def add(self, sequence: Sequence) -> None:
        """Behind all of its priority that wait: it has come after them."""
        fresh = self._fresh.get(sequence.priority)
        if fresh is None:
            fresh = self._fresh[sequence.priority] = OrderedDict()
            bisect.insort(self._priorities, sequence.priority)
        fresh[sequence] = None
        self._count += 1

    def put_back(self, sequence: Sequence) -> None:
        """Where its arrival puts it: it was running."""
        bisect.insort(self._returned, sequence, key=ORDER)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        fresh = self._fresh.get(sequence.priority)
        if fresh is not None and sequence in fresh:
            del fresh[sequence]
            if not fresh:
                del self._fresh[sequence.priority]
                self._priorities.remove(sequence.priority)
        else:
            index = bisect.bisect_left(self._returned, sequence.order, key=ORDER)
            assert self._returned[index] is sequence, "it waits"
            del self._returned[index]
        self._count -= 1
        self.refused = None
