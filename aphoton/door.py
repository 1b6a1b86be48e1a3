"""`Door`: where requests wait for a place in the scheduler's queue."""

import asyncio
from collections import deque
from collections.abc import Callable

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
    - Each waiter is let in, refused by `close`, or cancelled: nobody is forgotten.
    """

    def __init__(self, scheduler: Scheduler, *, max_waiting: int, overload: Overload, wake: Callable[[], None]) -> None:
        """Opens when ``scheduler`` has room, until `close`.

        :param wake: called when a sequence has been handed to the scheduler.
        """
        self._scheduler = scheduler
        self._max_waiting = max_waiting
        self._overload = overload
        self._wake = wake
        self._line: deque[tuple[asyncio.Future[None], Sequence]] = deque()
        scheduler.on_room = self._open

    def __len__(self) -> int:
        """Those who stand in line."""
        return len(self._line)

    async def enter(self, sequence: Sequence) -> None:
        """Hand the sequence to the scheduler, when there is a place.

        :raises EngineOverloaded: when there is none, and nobody is to wait for one.
        :raises AphotonError: from `close`.
        """
        if not self._line and not self._full():
            self._let_in(sequence)
            return
        if self._overload == "raise":
            raise EngineOverloaded(f"{self._max_waiting} requests wait already (max_waiting)")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (place, sequence)
        self._line.append(entry)
        try:
            await place
        except asyncio.CancelledError:
            if entry in self._line:
                self._line.remove(entry)
            elif not place.cancelled() and place.exception() is None:  # it has been let in meanwhile
                self._scheduler.abort(sequence)
            raise

    def close(self, error: Callable[[], Exception]) -> None:
        """Refuse those who stand in line, each with an ``error`` of its own. The door opens no more."""
        self._scheduler.on_room = None
        while self._line:
            place, _ = self._line.popleft()
            if not place.done():
                place.set_exception(error())

    def _open(self) -> None:
        """Let in those who stand in line, as far as there is room."""
        while self._line and not self._full():
            place, sequence = self._line.popleft()
            if not place.done():  # cancelled, it only has not been told yet
                place.set_result(None)
                self._let_in(sequence)

    def _full(self) -> bool:
        """Whether ``max_waiting`` requests wait already, beyond those that the next launch can admit."""
        waiting = len(self._scheduler.waiting)
        return waiting >= self._max_waiting and waiting >= self._max_waiting + self._scheduler.admissible

    def _let_in(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._wake()
