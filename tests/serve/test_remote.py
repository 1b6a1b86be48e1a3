"""`RemoteBackend` over handles that are none of Ray's."""

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

    async def remote(self) -> ModelCard:
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
