"""`EventStream`: an answer as server-sent events.

The format: "Server-sent events", HTML Living Standard, WHATWG. An event is ``data:`` and a line of JSON, then an empty
line.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aphoton_serve.attendance import ClientGone, attended
from aphoton_serve.errors import ApiError, describe, problem_response
from aphoton_serve.protocol_responses import encode

__all__ = ["LAST_WORD", "Emit", "EventStream", "timed_out"]

Emit = Callable[[Any], Awaitable[None]]
"""Sends a body as an event."""

LAST_WORD = 5.0
"""Seconds that a client has to take the error that ends its stream."""

DONE = b"data: [DONE]\n\n"


def timed_out(seconds: float) -> ApiError:
    """For a request that has taken longer than it may."""
    return ApiError(504, f"the request has taken {seconds:g} s", kind="server_error", code="timeout")


class EventStream(Response):
    """Sends events as they are made, ``[DONE]`` at their end, and an ``error`` event instead when something fails.

    The response begins with the first event: what fails before has a status code of its own. A client that has gone
    ends the making at once. One slower than the model delays it, so that what it gets next is more.
    """

    media_type = "text/event-stream"

    def __init__(self, make: Callable[[Emit], Awaitable[None]], *, timeout: float) -> None:
        """:param make: makes all events. Several of its tasks may emit at the same time."""
        self.status_code = 200
        self.background = None
        # Proxies such as nginx gather a response otherwise.
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._make = make
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        sending = anyio.Lock(fast_acquire=True)  # it is nearly always free, and a turn of the loop is long

        async def write(data: bytes) -> None:
            nonlocal started
            async with sending:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})

        async def emit(body: Any) -> None:
            await write(b"data: " + encode(body) + b"\n\n")

        async def run() -> None:
            await self._make(emit)
            await write(DONE)

        try:
            await attended(receive, run, seconds=self._timeout)
        except ClientGone:
            return
        except Exception as error:
            problem = describe(timed_out(self._timeout) if isinstance(error, TimeoutError) else error)
            if not started:
                await problem_response(problem)(scope, receive, send)
                return
            with anyio.move_on_after(LAST_WORD):
                await write(b"event: error\ndata: " + problem.body() + b"\n\n")
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        with anyio.move_on_after(LAST_WORD):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
