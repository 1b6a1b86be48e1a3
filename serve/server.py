"""`Server`: uvicorn's, with an end that leaves nobody without a word."""

import asyncio
import math
import socket

import anyio
import uvicorn
from starlette.types import ASGIApp

from aphoton_serve.local import LocalBackend
from aphoton_serve.patience import impatient
from aphoton_serve.sse import LAST_WORD

__all__ = ["Server"]

HURRY = 1.0
"""Seconds for last words after a second Ctrl-C."""


class Server(uvicorn.Server):
    """Serves until a signal comes. Then whoever has been accepted has ``grace``.

    Requests that outlast it end with an error that says so, and not with the connection; connections that last for
    another `LAST_WORD` are cut.
    """

    def __init__(
        self, app: ASGIApp, backend: LocalBackend, *, host: str, port: int, body_timeout: float, grace: float
    ) -> None:
        """:param grace: seconds."""
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=impatient(body_timeout),
                ws="none",  # or an upgrade would take the connection from a request before it
                access_log=False,  # the gate writes a line for each request
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(grace + LAST_WORD) + 1,  # `_end` is before it
            )
        )
        self._backend = backend
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._end)
            await super().shutdown(sockets)
            group.cancel_scope.cancel()
        if self.force_exit:  # somebody is in a hurry
            await self._backend.aclose()
            if tasks := list(self.server_state.tasks):
                await asyncio.wait(tasks, timeout=HURRY)

    async def _end(self) -> None:
        await anyio.sleep(self._grace)
        await self._backend.aclose()
        await anyio.sleep(LAST_WORD)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
