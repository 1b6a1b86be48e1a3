"""The FastAPI app that has the engine inside."""

from typing import Any

import httpx
import pytest
from engine.waiting import idle, until

from aphoton import Engine


@pytest.fixture
def webapp(example: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("APHOTON_MODEL", "random:tiny")
    return example("webapp")


async def test_streams_and_refuses(webapp: Any, hosting: Any) -> None:
    async with hosting(webapp.app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        engine: Engine = webapp.app.state.engine
        async with client.stream("POST", "/continue", json={"text": "Once", "max_tokens": 300}) as response:
            assert response.status_code == 200 and response.headers["content-type"] == "text/plain; charset=utf-8"
            chunks = [chunk async for chunk in response.aiter_bytes()]
        assert len(chunks) > 3 and b"".join(chunks).decode()
        assert engine.stats().tokens == 300
        for body, status, words in (
            ({"text": "x" * 9000}, 400, "9000 tokens"),
            ({"text": "x" * 11_000}, 422, "10000 characters"),
            ({"text": "x", "max_tokens": 0}, 422, "greater than or equal to 1"),
            ({}, 422, "required"),
        ):
            refused = await client.post("/continue", json=body)
            assert (refused.status_code, words in refused.text) == (status, True), refused.text
        await idle(engine)


async def test_a_client_that_goes_ends_its_request(webapp: Any, hosting: Any) -> None:
    async with hosting(webapp.app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        engine: Engine = webapp.app.state.engine
        async with client.stream("POST", "/continue", json={"text": "Once", "max_tokens": 2000}) as response:
            await anext(response.aiter_raw())
            assert engine.stats().running == 1
        await idle(engine)
        assert 0 < engine.stats().tokens < 2000


async def test_a_full_queue_is_told(webapp: Any, hosting: Any) -> None:
    async with Engine("random:tiny", max_rows=1, max_waiting=0, overload="raise", device="cpu") as engine:
        webapp.app.dependency_overrides[webapp.engine_of] = lambda: engine
        async with hosting(webapp.app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            async with engine.stream("Once", max_tokens=2000, ignore_eos=True):
                await until(lambda: engine.stats().running)
                assert (await client.post("/continue", json={"text": "Once"})).status_code == 429
            await idle(engine)
            assert (await client.post("/continue", json={"text": "Once", "max_tokens": 3})).status_code == 200
