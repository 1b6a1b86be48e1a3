"""`Turnstile`: a few at a time."""

import asyncio
import time
from collections import deque

__all__ = ["Turnstile"]

LONG = 0.15e-3
"""Seconds of a turn of the loop after which fewer pass in the next."""


class Turnstile:
    """Lets a few through in each turn of the event loop, in the order of arrival.

    A crowd that arrives at once is ready in one turn, and whoever has a turn after it waits for all of them. Behind a
    turnstile, the others have their turns in between. A timer's task waits for two or three turns, so where turns are
    long, whoever makes them so, half as many pass, and again twice as many where they are not. Belongs to the loop on
    which it is used.
    """

    def __init__(self, most: int, *, steady: bool = False) -> None:
        """:param most: that pass in a turn. At least a quarter of them do.
        :param steady: it is ``most`` however long turns are.
        """
        self._most = most
        self._least = most if steady else max(most // 4, 1)
        self._width = most
        self._left = most
        self._turned = 0.0  # when the turn of the loop that is counted began
        self._line: deque[asyncio.Future[None]] = deque()
        self._weights: dict[asyncio.Future[None], int] = {}  # of those in line who are not 1
        self._turning = False  # `_turn` has been asked for

    def __len__(self) -> int:
        """Those who stand in line."""
        return len(self._line)

    async def enter(self) -> None:
        """Return when it is the caller's turn: at once, unless as many have passed in this one as may."""
        loop = asyncio.get_running_loop()
        if self._left > 0 and not self._line:
            self._pass(loop)
            return
        place: asyncio.Future[None] = loop.create_future()
        self._line.append(place)
        await place

    def call(self, waiter: asyncio.Future[None], weight: int = 1) -> None:
        """Resolve ``waiter``, which is not done, when it is its turn. Whoever awaits it runs in the turn after.

        :param weight: as many others as take as long.
        """
        if self._left > 0 and not self._line:
            self._pass(waiter.get_loop(), weight)
            waiter.set_result(None)
        else:
            self._line.append(waiter)
            if weight != 1:
                self._weights[waiter] = weight

    def weigh(self, waiter: asyncio.Future[None], weight: int) -> None:
        """Whoever awaits ``waiter``, which has been called, has got more to do since: as much as so many others."""
        if not waiter.done():  # it stands in line
            self._weights[waiter] = weight

    def _pass(self, loop: asyncio.AbstractEventLoop, weight: int = 1) -> None:
        self._left -= weight
        if not self._turning:
            self._turning = True
            self._turned = time.perf_counter()
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.perf_counter()
        if now - self._turned > LONG:
            self._width = max(self._width // 2, self._least)
        else:
            self._width = min(2 * self._width, self._most)
        self._turned = now
        self._turning = bool(self._line)
        line, left, weights = self._line, self._width, self._weights
        while line and left > 0:
            place = line.popleft()
            weight = weights.pop(place, 1) if weights else 1
            if not place.done():  # else whoever stood there was cancelled
                place.set_result(None)
                left -= weight
        self._left = left
        if self._turning:
            loop.call_soon(self._turn, loop)
