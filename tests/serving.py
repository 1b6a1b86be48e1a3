"""A service on a socket of this machine, in the test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
from engine.waiting import until

from aphoton import Engine
from aphoton_serve.keys import KeyRing
from aphoton_serve.local import LocalBackend
from aphoton_serve.server import Server
from aphoton_serve.service import make_app
from aphoton_serve.settings import ServiceSettings

__all__ = ["Served", "serving"]


@dataclass
class Served:
    """:ivar server: the program that serves it.
    :ivar web: plain HTTP to it.
    :ivar ai: OpenAI's client, which tries once.
    """

    port: int
    server: Server
    backend: LocalBackend
    web: httpx.AsyncClient
    ai: openai.AsyncOpenAI

    def engine(self, name: str) -> Engine:
        return self.backend.engine(name)


@asynccontextmanager
async def serving(
    backend: LocalBackend,
    settings: ServiceSettings | None = None,
    keys: KeyRing | None = None,
    key: str = "unused",
    *,
    send_buffer: int | None = None,
) -> AsyncIterator[Served]:
    """The service over ``backend``, which is started and closed.

    :param send_buffer: bytes that the system takes of an answer before anybody reads it; None: as it likes.
    """
    async with backend:
        with socket.socket() as listening:
            if send_buffer is not None:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            settings = settings or ServiceSettings()
            app = make_app(backend, settings, keys=keys)
            server = Server(app, backend, host="", port=port, body_timeout=settings.body_timeout, grace=30.0)
            task = asyncio.create_task(server.serve(sockets=[listening]))
            await until(lambda: server.started or task.done())
            url = f"http://127.0.0.1:{port}"
            async with (
                httpx.AsyncClient(base_url=url, timeout=60) as web,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as ai,
            ):
                yield Served(port=port, server=server, backend=backend, web=web, ai=ai)
            server.should_exit = True
            await task
