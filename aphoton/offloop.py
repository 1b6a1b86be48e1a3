"""`off_loop`: what takes long is done in a thread."""

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

__all__ = ["off_loop"]

T = TypeVar("T")

INLINE_TEXT = 512
"""Characters of text that are worked on in the loop: shorter than the hop to a thread and back costs."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do ``work`` in a thread, unless it is on so little text that the hop costs more.

    :param size: characters.
    """
    return work() if size <= INLINE_TEXT else await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
