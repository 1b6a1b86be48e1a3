"""The examples as modules, and what they run with."""

import asyncio
import importlib.util
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from engine.waiting import until
from onethread import one_thread as one_thread

from aphoton import Engine

Example = Callable[[str], Any]
Hosting = Callable[[Any], AbstractAsyncContextManager[str]]


@pytest.fixture(scope="session")
def example() -> Example:
    """An example by its name, afresh."""

    def load(name: str) -> Any:
        path = Path(__file__).parents[2] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
async def tiny() -> AsyncIterator[Engine]:
    async with Engine("random:tiny", device="cpu", dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session")
def hosting() -> Hosting:
    """Runs an ASGI application on a socket of this machine, in the test's own event loop."""

    @asynccontextmanager
    async def host(app: Any) -> AsyncIterator[str]:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
            task = asyncio.create_task(server.serve(sockets=[listening]))
            await until(lambda: server.started or task.done())
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True
            await task

    return host
