"""`Turnstile`: a few at a time."""

import asyncio
from collections import deque

__all__ = ["Turnstile"]


class Turnstile:
    """Lets a few through in each turn of the event loop, in the order of arrival.

    A crowd that arrives at once is ready in one turn, and whoever has a turn after it waits for all of them. Behind a
    turnstile, the others have their turns in between. Belongs to the loop on which it is used.
    """

    def __init__(self, most: int) -> None:
        """:param most: that pass in a turn."""
        self._most = most
        self._left = most
        self._line: deque[asyncio.Future[None]] = deque()
        self._turning = False  # `_turn` has been asked for

    def __len__(self) -> int:
        """Those who stand in line."""
        return len(self._line)

    async def enter(self) -> None:
        """Return when it is the caller's turn: at once, unless ``most`` have passed in this one."""
        loop = asyncio.get_running_loop()
        if self._left and not self._line:
            self._pass(loop)
            return
        place: asyncio.Future[None] = loop.create_future()
        self._line.append(place)
        await place

    def call(self, waiter: asyncio.Future[None]) -> None:
        """Resolve ``waiter``, which is not done, when it is its turn. Whoever awaits it runs in the turn after."""
        if self._left and not self._line:
            self._pass(waiter.get_loop())
            waiter.set_result(None)
        else:
            self._line.append(waiter)

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left -= 1
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._most
        self._turning = bool(self._line)
        while self._line and self._left:
            place = self._line.popleft()
            if not place.done():  # else whoever stood there was cancelled
                place.set_result(None)
                self._left -= 1
        if self._turning:
            loop.call_soon(self._turn, loop)
