"""`attended`: work that ends when the client that it is for has gone."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import anyio
from starlette.types import Receive

__all__ = ["ClientGone", "attended"]

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection: nobody wants the answer."""


async def attended(receive: Receive, work: Callable[[], Awaitable[T]], *, seconds: float) -> T:
    """The result of ``work``, which is cancelled as soon as the client has gone.

    :param receive: the connection's; the request's body must have been read.
    :raises ClientGone: then.
    :raises TimeoutError: when it has taken that many ``seconds``.
    """
    gone = False
    results: list[T] = []
    failure: Exception | None = None

    async def watch() -> None:
        nonlocal gone
        # Ray's may raise instead, when its proxy has ended the request for a client that has gone.
        with suppress(Exception):
            while (await receive())["type"] != "http.disconnect":
                pass
        gone = True
        group.cancel_scope.cancel()

    with anyio.move_on_after(seconds) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            try:
                results.append(await work())
            except Exception as error:  # as it is, and not in a group
                failure = error
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if results:
        return results[0]
    if gone:
        raise ClientGone
    assert scope.cancelled_caught
    raise TimeoutError
