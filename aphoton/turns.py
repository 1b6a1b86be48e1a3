"""`let_go_first`: turns of the event loop for others."""

import asyncio

__all__ = ["let_go_first"]

TURNS = 3
"""From a timer's being due to its task: the turn that is under way, the timer's own, the task's."""


async def let_go_first() -> None:
    """Leave the loop to whoever is ready, and to whoever waits for a timer that is due.

    After one turn a task that slept would still wait for whatever the caller does next. Three short turns cost no time
    to speak of, and where the device is busy for longer than the caller, they cost nothing.
    """
    for _ in range(TURNS):
        await asyncio.sleep(0)
