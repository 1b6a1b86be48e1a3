"""`attended`: a client that goes ends what is done for it."""

import asyncio

import pytest
from starlette.types import Message

from aphoton_serve.attendance import ClientGone, attended


@pytest.mark.parametrize("error", [None, RuntimeError("the proxy has ended this request")])
async def test_a_client_that_goes(error: Exception | None) -> None:
    """Servers say so, or raise."""
    gone = asyncio.Event()
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def receive() -> Message:
        await gone.wait()
        if error is not None:
            raise error
        return {"type": "http.disconnect"}

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(attended(receive, work, seconds=60))
    await begun.wait()
    gone.set()
    with pytest.raises(ClientGone):
        await task
    assert ended.is_set()
