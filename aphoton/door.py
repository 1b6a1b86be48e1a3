"""`Door`: where requests wait for a place in the scheduler's queue."""

import asyncio
from collections.abc import Callable

from aphoton.completion import FinishReason
from aphoton.config import Overload
from aphoton.errors import EngineOverloaded
from aphoton.scheduler import Scheduler, Sequence, Waiting

__all__ = ["Door"]


class Door:
    """The line in front of the scheduler's queue, which is full with ``max_waiting`` sequences (a request has one for
    each of its outputs) beyond those that the next launch can admit.

    What holds between any two calls:

    - The line is in the order of the queue: lower priorities first, and inside one the order of arrival. Places are
      given from its head only, and a newcomer goes past the door only when nobody stands there: nobody overtakes one of
      its priority.
    - Somebody stands in line only while the queue is full: each place that comes free is given at once.
    - Who stands in line holds nothing else: no row, no page. So a waiter can be cancelled at any moment. In line, it is
      taken out of it; let in already, but not yet told, its sequence ends and what that frees goes to the next.
    - Each waiter is let in, refused by `close`, ended, or cancelled: nobody is forgotten.

    A request's sequences come together and stand behind each other. It is told when the first is let in; those that
    stand in line then are let in, or ended, as the others. Where nobody is to wait, it is refused unless the first is
    let in at once: however many there are, an idle engine takes them.
    """

    def __init__(self, scheduler: Scheduler, *, max_waiting: int, overload: Overload, wake: Callable[[], None]) -> None:
        """Opens when ``scheduler`` has room, until `close`.

        :param wake: called when a sequence has been handed to the scheduler.
        """
        self._scheduler = scheduler
        self._max_waiting = max_waiting
        self._overload = overload
        self._wake = wake
        self._line = Waiting()
        # Whoever comes first of a request has a future, by which it is told; the others have None.
        self._places: dict[Sequence, asyncio.Future[None] | None] = {}
        scheduler.ends.on_room = self._open

    def __len__(self) -> int:
        """Those who stand in line."""
        return len(self._line)

    async def enter(self, *sequences: Sequence) -> None:
        """Hand a request's sequences to the scheduler, when there is a place for the first of them.

        :raises EngineOverloaded: when there is none, and nobody is to wait for one.
        :raises AphotonError: from `close`.
        """
        if self._overload == "raise" and (self._line or self._full()):
            raise EngineOverloaded(f"as many wait already as may (max_waiting: {self._max_waiting})")
        place: asyncio.Future[None] | None = None
        for count, sequence in enumerate(sequences):
            if not self._line and not self._full():
                self._let_in(sequence)
                continue
            if not count:
                place = asyncio.get_running_loop().create_future()
            self._line.add(sequence)
            self._places[sequence] = place if not count else None
        if place is None:
            return
        try:
            await place
        except BaseException:
            let_in = place.done() and not place.cancelled() and place.exception() is None
            for count, sequence in enumerate(sequences):
                if sequence in self._places:
                    self._leave(sequence)
                elif count or let_in:  # meanwhile
                    self._scheduler.ends.abort(sequence)
            raise

    def finish(self, sequence: Sequence, reason: FinishReason | None, *, error: Exception | None = None) -> None:
        """End a sequence that has not ended, of a request that has been let in, in line or past the door."""
        if sequence in self._places:
            self._leave(sequence)
            self._scheduler.add(sequence)  # for no longer than it takes to end it as all others
        self._scheduler.ends.finish(sequence, reason, error=error)

    def close(self, error: Callable[[], Exception]) -> None:
        """Refuse those who stand in line, each with an ``error`` of its own. The door opens no more."""
        self._scheduler.ends.on_room = None
        while self._line:
            sequence = next(iter(self._line))
            place = self._leave(sequence)
            # The first of a request too, though it is told by its place: the others' end is its end, and it ends once.
            self._scheduler.add(sequence)
            self._scheduler.ends.finish(sequence, None, error=error())
            if place is not None and not place.done():
                place.set_exception(error())

    def _open(self) -> None:
        """Let in those who stand in line, as far as there is room."""
        while self._line and not self._full():
            sequence = next(iter(self._line))
            place = self._leave(sequence)
            if place is None:
                self._let_in(sequence)
            elif not place.done():  # else it was cancelled, and only has not been told yet
                place.set_result(None)
                self._let_in(sequence)

    def _leave(self, sequence: Sequence) -> asyncio.Future[None] | None:
        self._line.remove(sequence)
        return self._places.pop(sequence)

    def _full(self) -> bool:
        """Whether ``max_waiting`` sequences wait already, beyond those that the next launch can admit."""
        waiting = len(self._scheduler.waiting)
        return waiting >= self._max_waiting and waiting >= self._max_waiting + self._scheduler.admissible

    def _let_in(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._wake()
