"""`RemoteBackend` over handles that are none of Ray's."""

import asyncio
from typing import Any

import httpx
import pytest

from aphoton_serve.backend import ModelCard
from aphoton_serve.service import make_app

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")


class Handle:
    """Of a deployment that tells what its model is; ``asked`` has whoever did."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self._name = name
        self._asked = asked

    @property
    def card(self) -> "Handle":
        return self

    def remote(self) -> "asyncio.Task[ModelCard]":
        return asyncio.create_task(self._answer())

    async def _answer(self) -> ModelCard:
        self._asked.append(self._name)
        return ModelCard(id=self._name, created=0, max_model_len=10, can_chat=False)


async def test_a_request_for_one_model_wakes_no_other() -> None:
    from aphoton_serve.remote import RemoteBackend

    asked: list[str] = []
    handles: dict[str, Any] = {name: Handle(name, asked) for name in ("asleep", "awake")}
    app: Any = make_app(RemoteBackend(handles, sleepers=["asleep"]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as web:
        for _ in range(2):
            assert (await web.get("/v1/models/awake")).json()["id"] == "awake"
        for name, status in (("nobody", 404), ("awake:adapter", 400)):
            assert (await web.get(f"/v1/models/{name}")).status_code == status
        assert asked == ["awake"]
        assert [model["id"] for model in (await web.get("/v1/models")).json()["data"]] == ["asleep", "awake"]
    assert asked == ["awake", "asleep"]


class Sleeper(Handle):
    """Of one that never starts; ``waiting`` is set while somebody waits for it."""

    def __init__(self) -> None:
        super().__init__("asleep", [])
        self.waiting = asyncio.Event()

    async def _answer(self) -> ModelCard:
        self.waiting.set()
        try:
            return await asyncio.Future[ModelCard]()
        finally:
            self.waiting.clear()


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
def app(sleeper: Sleeper) -> Any:
    from aphoton_serve.remote import RemoteBackend

    handles: dict[str, Any] = {"asleep": sleeper}
    return make_app(RemoteBackend(handles, sleepers=["asleep"]))


async def test_a_request_for_a_model_that_does_not_start_has_its_time(app: Any, sleeper: Sleeper) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as web:
        for path, body in (
            ("completions", {"prompt": "Hi"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ):
            found = await web.post(
                f"/v1/{path}", json={"model": "asleep", **body}, headers={"x-request-timeout": "0.01"}
            )
            assert found.status_code == 504
        found = await web.get("/v1/models", headers={"x-request-timeout": "0.01"})
        assert found.status_code == 504
    assert not sleeper.waiting.is_set(), "nobody waits any more"


async def test_a_client_that_goes_waits_for_no_model(app: Any, sleeper: Sleeper) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not sleeper.waiting.is_set():
            await sleeper.waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models/asleep",
        "raw_path": b"/v1/models/asleep",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert not sleeper.waiting.is_set()
