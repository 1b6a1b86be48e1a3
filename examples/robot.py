"""A robot's loop over a websocket: it sends what it sees, and gets what to do, piece by piece. Whenever it sees
something new, the plan that is being made for what it saw before is dropped, and another one begins.

python examples/robot.py [MODEL] [PORT]
"""

import asyncio
import json
import sys

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

import aphoton


async def plan(engine: aphoton.Engine, socket: ServerConnection, number: int, seen: str) -> None:
    try:
        async with engine.stream(f"The robot sees {seen}. It", max_tokens=400) as stream:
            async for piece in stream:
                await socket.send(json.dumps({"seen": number, "do": piece.text}))
    except (aphoton.InvalidRequest, aphoton.PromptTooLong) as error:
        await socket.send(json.dumps({"seen": number, "error": str(error)}))


async def drive(engine: aphoton.Engine, socket: ServerConnection) -> None:
    """One robot."""
    planning: asyncio.Task[None] | None = None
    number = 0
    try:
        async for seen in socket:
            await stop(planning)
            number += 1
            planning = asyncio.create_task(plan(engine, socket, number, str(seen)))
    finally:
        await stop(planning)


async def stop(planning: asyncio.Task[None] | None) -> None:
    """When this returns, nothing more of that plan is sent, and the engine has let it go."""
    if planning is not None:
        planning.cancel()
        (outcome,) = await asyncio.gather(planning, return_exceptions=True)
        if isinstance(outcome, Exception) and not isinstance(outcome, ConnectionClosed):
            raise outcome


async def main(model: str = "smollm2", port: str = "8765") -> None:
    async with (
        aphoton.Engine(model) as engine,
        serve(lambda socket: drive(engine, socket), "127.0.0.1", int(port)) as server,
    ):
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
