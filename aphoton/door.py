"""`Door`: where requests wait for a place in the scheduler's queue."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from aphoton.completion import FinishReason
from aphoton.config import Overload
from aphoton.errors import EngineOverloaded
from aphoton.scheduler import Scheduler, Sequence

__all__ = ["Door"]


class Door:
    """The line in front of the scheduler's queue, which is full with ``max_waiting`` requests beyond those that the
    next launch can admit.

    What holds between any two calls:

    - Whoever stands in line came after all who are in the queue, and the line is in the order of arrival. Places are
      given from its head only, and a newcomer goes past the door only when nobody stands there: nobody overtakes.
    - Somebody stands in line only while the queue is full: each place that comes free is given at once.
    - Who stands in line holds nothing else: no row, no page. So a waiter can be cancelled at any moment. In line, it is
      taken out of it; let in already, but not yet told, its sequence ends and what that frees goes to the next.
    - Each waiter is let in, refused by `close`, ended, or cancelled: nobody is forgotten.

    A request's sequences come together and stand behind each other. It is told when the first is let in; those that
    stand in line then are let in, or ended, as the others.
    """

    def __init__(self, scheduler: Scheduler, *, max_waiting: int, overload: Overload, wake: Callable[[], None]) -> None:
        """Opens when ``scheduler`` has room, until `close`.

        :param wake: called when a sequence has been handed to the scheduler.
        """
        self._scheduler = scheduler
        self._max_waiting = max_waiting
        self._overload = overload
        self._wake = wake
        # Whoever comes first of a request has a future, by which it is told; the others have None.
        self._line: OrderedDict[Sequence, asyncio.Future[None] | None] = OrderedDict()
        scheduler.on_room = self._open

    def __len__(self) -> int:
        """Those who stand in line."""
        return len(self._line)

    async def enter(self, *sequences: Sequence) -> None:
        """Hand a request's sequences to the scheduler, when there is a place for the first of them.

        :raises EngineOverloaded: when there is not one for each, and nobody is to wait for one.
        :raises AphotonError: from `close`.
        """
        place: asyncio.Future[None] | None = None
        for count, sequence in enumerate(sequences):
            if not self._line and not self._full():
                self._let_in(sequence)
                continue
            if self._overload == "raise":
                for other in sequences[:count]:
                    self._scheduler.abort(other)
                few = f", and the request asks for {len(sequences)} outputs" if len(sequences) > 1 else ""
                raise EngineOverloaded(f"{self._max_waiting} requests wait already (max_waiting){few}")
            if not count:
                place = asyncio.get_running_loop().create_future()
            self._line[sequence] = place if not count else None
        if place is None:
            return
        try:
            await place
        except BaseException:
            let_in = place.done() and not place.cancelled() and place.exception() is None
            for count, sequence in enumerate(sequences):
                if sequence in self._line:
                    del self._line[sequence]
                elif count or let_in:  # meanwhile
                    self._scheduler.abort(sequence)
            raise

    def finish(self, sequence: Sequence, reason: FinishReason | None, *, error: Exception | None = None) -> None:
        """End a sequence that has not ended, of a request that has been let in, in line or past the door."""
        if sequence in self._line:
            del self._line[sequence]
            self._scheduler.add(sequence)  # for no longer than it takes to end it as all others
        self._scheduler.finish(sequence, reason, error=error)

    def close(self, error: Callable[[], Exception]) -> None:
        """Refuse those who stand in line, each with an ``error`` of its own. The door opens no more."""
        self._scheduler.on_room = None
        while self._line:
            sequence, place = self._line.popitem(last=False)
            if place is None:
                self._scheduler.add(sequence)
                self._scheduler.finish(sequence, None, error=error())
            elif not place.done():
                place.set_exception(error())

    def _open(self) -> None:
        """Let in those who stand in line, as far as there is room."""
        while self._line and not self._full():
            sequence, place = self._line.popitem(last=False)
            if place is None:
                self._let_in(sequence)
            elif not place.done():  # else it was cancelled, and only has not been told yet
                place.set_result(None)
                self._let_in(sequence)

    def _full(self) -> bool:
        """Whether ``max_waiting`` requests wait already, beyond those that the next launch can admit."""
        waiting = len(self._scheduler.waiting)
        return waiting >= self._max_waiting and waiting >= self._max_waiting + self._scheduler.admissible

    def _let_in(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._wake()
