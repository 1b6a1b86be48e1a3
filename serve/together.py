"""`together`: several pieces of work at the same time."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

__all__ = ["together"]

T = TypeVar("T")


async def together(works: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of all, in order. The first that fails cancels the others, and its error is raised as it is."""
    if len(works) == 1:
        return [await works[0]()]
    results: dict[int, T] = {}
    failure: Exception | None = None

    async def one(number: int) -> None:
        nonlocal failure
        try:
            results[number] = await works[number]()
        except Exception as error:
            if failure is None:
                failure = error
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for number in range(len(works)):
            group.start_soon(one, number)
    if failure is not None:
        raise failure
    return [results[number] for number in range(len(works))]
