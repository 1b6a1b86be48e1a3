"""`in_thread`, `off_loop`: what takes long is done in a thread."""

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

__all__ = ["in_thread", "off_loop"]

T = TypeVar("T")

INLINE_TEXT = 512
"""Characters of text that are worked on in the loop: shorter than the hop to a thread and back costs."""

THREADS = 40
"""As many as anyio gives an app."""

_threads: RunVar[anyio.CapacityLimiter] = RunVar("aphoton_threads")


async def in_thread(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread. A caller that is cancelled does not wait for it.

    Not one of the app's threads: all of those may be at work on calls that wait for this one.
    """
    try:
        threads = _threads.get()
    except LookupError:
        threads = anyio.CapacityLimiter(THREADS)
        _threads.set(threads)
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=threads)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do ``work`` in a thread, unless it is on so little text that the hop costs more.

    :param size: characters.
    """
    return work() if size <= INLINE_TEXT else await in_thread(work)
