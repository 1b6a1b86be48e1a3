"""A service on a socket of this machine, in the test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
import uvicorn
from engine.waiting import until

from aphoton import Engine
from aphoton_serve.keys import KeyRing
from aphoton_serve.local import LocalBackend
from aphoton_serve.service import make_app
from aphoton_serve.settings import ServiceSettings

__all__ = ["Served", "serving"]


@dataclass
class Served:
    """:ivar web: plain HTTP to it.
    :ivar ai: OpenAI's client, which tries once.
    """

    port: int
    backend: LocalBackend
    web: httpx.AsyncClient
    ai: openai.AsyncOpenAI

    def engine(self, name: str) -> Engine:
        return self.backend.engine(name)


@asynccontextmanager
async def serving(
    backend: LocalBackend, settings: ServiceSettings | None = None, keys: KeyRing | None = None, key: str = "unused"
) -> AsyncIterator[Served]:
    """The service over ``backend``, which is started and closed."""
    async with backend:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            config = uvicorn.Config(
                make_app(backend, settings, keys=keys), log_config=None, access_log=False, lifespan="on"
            )
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve(sockets=[listening]))
            await until(lambda: server.started or task.done())
            url = f"http://127.0.0.1:{port}"
            async with (
                httpx.AsyncClient(base_url=url, timeout=60) as web,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as ai,
            ):
                yield Served(port=port, backend=backend, web=web, ai=ai)
            server.should_exit = True
            await task
