"""The robot's loop: what it sees ends the plan for what it saw before."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine.waiting import idle
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

from aphoton import Engine


@pytest.fixture
async def url(example: Any, tiny: Engine) -> AsyncIterator[str]:
    robot = example("robot")
    async with serve(lambda socket: robot.drive(tiny, socket), "127.0.0.1", 0) as server:
        (listening,) = server.sockets
        yield f"ws://127.0.0.1:{listening.getsockname()[1]}"


async def test_a_new_sight_drops_the_old_plan(url: str, tiny: Engine) -> None:
    async with connect(url) as socket:
        now = 0
        for number in range(1, 21):
            await socket.send(f"{number} doors")
            while now < number:  # what was on its way comes first
                piece = json.loads(await socket.recv())
                assert piece["seen"] in (now, number)
                now = piece["seen"]
            assert tiny.stats().running == 1
        text = piece["do"]
        while len(text) < 50:
            piece = json.loads(await socket.recv())
            assert piece["seen"] == number
            text += piece["do"]
    await idle(tiny)
    assert tiny.stats().tokens < 20 * 400


async def test_a_robot_that_goes_leaves_nothing(url: str, tiny: Engine) -> None:
    for _ in range(5):
        async with connect(url) as one, connect(url) as other:
            await one.send("a door")
            await other.send("a wall")
            await one.recv()
            await other.recv()
            one.transport.abort()
    await idle(tiny)


async def test_what_cannot_be_planned_is_told_and_the_next_can(url: str) -> None:
    async with connect(url) as socket:
        await socket.send("x" * 5000)
        assert "tokens" in json.loads(await socket.recv())["error"]
        await socket.send("a door")
        assert json.loads(await socket.recv())["seen"] == 2
