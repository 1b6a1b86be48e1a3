"""`Ramp`: clients that become more and fewer, and what the replicas of their model do meanwhile."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from aphoton import AphotonError
from aphoton.checks import check_float
from aphoton_serve.benchclient import NAME, Ask, completions
from aphoton_serve.cluster import local_cluster

__all__ = ["Arrival", "Course", "Look", "Ramp", "ramp_on_ray"]

EVERY = 0.5
"""Seconds between two looks at the replicas."""
QUICK: dict[str, Any] = {"upscale_delay": 1.0, "downscale_delay": 4.0, "look_back": 2.0}
"""Seconds: a ramp is over in minutes."""
BREATH = 0.5
"""Seconds after which a client whose request failed sends the next one."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What there was at a moment.

    :ivar at: seconds since the beginning.
    :ivar streams: that clients waited for.
    :ivar running, starting, stopping: replicas.
    """

    at: float
    streams: int
    running: int
    starting: int
    stopping: int


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    :ivar at: when it was sent, in seconds since the beginning.
    :ivar ttft: seconds until its first token. None: it failed.
    :ivar error: of what it failed.
    """

    at: float
    ttft: float | None = None
    error: str | None = None


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen.

    :ivar clients: of each stage.
    :ivar stage: its length, in seconds.
    :ivar arrivals: in the order in which they ended.
    """

    clients: list[int]
    stage: float
    looks: list[Look]
    arrivals: list[Arrival]


class Ramp:
    """Clients that each have one stream after the other: so many in the first stage, so many in the next."""

    def __init__(self, clients: list[int], stage: float, tokens: int) -> None:
        """
        :param clients: of each stage.
        :param stage: its length, in seconds.
        :param tokens: of each stream.
        :raises InvalidRequest: for a stage of no length.
        """
        check_float("stage", stage, 0.0, 1e6, open_low=True)
        self._clients = clients
        self._stage = stage
        self._tokens = tokens
        self._wanted = 0
        self._there: set[int] = set()
        self._streams = 0
        self._began = 0.0
        self._arrivals: list[Arrival] = []
        self._looks: list[Look] = []

    async def run(self, ask: Ask, replicas: Callable[[], Counter[str]]) -> Course:
        """Send the load.

        :param ask: has one stream.
        :param replicas: how many there are, by Serve's name for their state. Called in a thread.
        """
        self._began = time.perf_counter()
        looking = asyncio.create_task(self._look(replicas))
        try:
            async with asyncio.TaskGroup() as group:
                for number in self._clients:
                    self._wanted = number
                    for client in set(range(number)) - self._there:  # one that was to go may not have gone yet
                        self._there.add(client)
                        group.create_task(self._client(client, ask))
                    await asyncio.sleep(self._stage)
                self._wanted = 0
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
        return Course(clients=self._clients, stage=self._stage, looks=self._looks, arrivals=self._arrivals)

    async def _client(self, number: int, ask: Ask) -> None:
        while number < self._wanted:
            at = time.perf_counter() - self._began
            self._streams += 1
            try:
                reply = await ask(self._tokens)
            except (AphotonError, OSError) as error:
                self._arrivals.append(Arrival(at=at, error=str(error)))
                await asyncio.sleep(BREATH)
            else:
                self._arrivals.append(Arrival(at=at, ttft=reply.first))
            finally:
                self._streams -= 1
        self._there.discard(number)

    async def _look(self, replicas: Callable[[], Counter[str]]) -> None:
        while True:
            states = await asyncio.to_thread(replicas)
            self._looks.append(
                Look(
                    at=time.perf_counter() - self._began,
                    streams=self._streams,
                    running=states["RUNNING"],
                    starting=states["STARTING"],
                    stopping=states["STOPPING"],
                )
            )
            await asyncio.sleep(EVERY)


def ramp_on_ray(model: str, settings: dict[str, Any], ramp: Ramp, max_replicas: int) -> Course:
    """A ramp against a model on a Ray of its own, with one replica at first and so many at most.

    :param settings: of each replica's engine.
    """
    from ray import serve

    from aphoton_serve.app import ModelArgs, ServiceArgs, application
    from aphoton_serve.keys import KeyRing

    args = ModelArgs(model=f"{NAME}={model}", max_replicas=max_replicas, **QUICK, **settings)
    engines = application([args], ServiceArgs(), KeyRing())

    def replicas() -> Counter[str]:
        return Counter(serve.status().applications["default"].deployments[f"engine-{NAME}"].replica_states)

    with local_cluster(cpus=max_replicas + 1) as url:
        serve.run(engines)
        return asyncio.run(ramp.run(completions(url), replicas))
