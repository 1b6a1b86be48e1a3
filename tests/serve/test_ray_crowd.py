"""Crowds of clients that vanish, with real Ray and real HTTP: nothing of them may be left, and nobody else harmed."""

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rawclient import RawClient

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

CROWD = 200
"""Clients that vanish."""
STEADY = 3
"""Clients that stay, beside the crowd."""
TOKENS = 400
"""Of each stream that stays."""
MOMENTS = 150
"""Chunks of the streams that stay, within which the others come, and within which each of them vanishes."""
OURS = ("LocalStream", "PacedStream", "CompletionStream", "Request", "Sequence", "RemoteStream", "EventStream")
"""What a request is made of, in the processes that it goes through."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    from aphoton_serve.cluster import local_cluster

    with local_cluster(cpus=4) as url:
        yield url


@pytest.fixture(params=[1, 2], ids=["endpoints in the one replica", "endpoints apart, two replicas"])
def service(request: pytest.FixtureRequest, cluster: str, talker: Path) -> Iterator[str]:
    from ray import serve

    from aphoton_serve.app import build

    args = {"device": "cpu", "dtype": "float32", "max_rows": 16, "max_waiting": 2 * CROWD, "num_cpus": 0.1}
    replicas = {"min_replicas": request.param, "max_replicas": request.param}
    serve.run(build({**args, **replicas, "model": f"talker={talker}"}))
    yield cluster
    serve.delete("default")


def messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class Held(NamedTuple):
    """What a process of Ray holds: requests by its own count, parts of requests, and open files and connections."""

    requests: int
    parts: Counter[str]
    files: int


def held() -> dict[str, Held]:
    """By each of Serve's actors that a request goes through."""

    def look(actor: Any) -> tuple[int, Counter[str], int]:  # in here, so that Ray takes its code to where it runs
        gc.collect()
        parts = Counter(type(one).__name__ for one in gc.get_objects() if type(one).__name__ in OURS)
        requests = actor.get_num_ongoing_requests() if hasattr(actor, "get_num_ongoing_requests") else 0
        return requests, parts, len(os.listdir("/proc/self/fd"))

    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    actors = {name: ray.get_actor(name, namespace="serve") for name in names if "REPLICA" in name or "PROXY" in name}
    answers = ray.get([actor.__ray_call__.remote(look) for actor in actors.values()])
    return {name: Held(*answer) for name, answer in zip(actors, answers, strict=True)}


class Beat:
    """Chunks that the streams which stay have had: what time is to the crowd."""

    def __init__(self) -> None:
        self._count = 0
        self._news = asyncio.Condition()

    async def tick(self) -> None:
        async with self._news:
            self._count += 1
            self._news.notify_all()

    async def elapse(self, count: int) -> None:
        """Wait for so many more."""
        goal = self._count + count
        async with self._news:
            await self._news.wait_for(lambda: self._count >= goal)


async def states(web: httpx.AsyncClient) -> Counter[str]:
    """Of all engines together, each sample by its name and its state or outcome."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families((await web.get("/metrics")).text):
        for sample in family.samples:
            labels = sample.labels.get("state") or sample.labels.get("outcome")
            sums[f"{sample.name} {labels}" if labels else sample.name] += sample.value
    return sums


async def test_a_crowd_that_vanishes(service: str) -> None:
    rng = random.Random(11)
    port = int(service.rpartition(":")[2])
    async with (
        httpx.AsyncClient(base_url=service, timeout=60) as web,
        openai.AsyncOpenAI(base_url=f"{service}/v1", api_key="unused", max_retries=0, timeout=120) as ai,
    ):
        beat = Beat()

        async def text(number: int) -> str:
            stream = await ai.chat.completions.create(
                model="talker", messages=messages(f"Story {number}"), max_tokens=TOKENS, temperature=0, stream=True
            )
            pieces = []
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
                await beat.tick()
            return "".join(pieces)

        async def vanishing(way: str, stream: bool, come: int, go: int) -> bytes:
            """Come at a moment, ask, and vanish; what it had seen by then."""
            tokens = 600 if stream or way != "reading" else 60
            body = {"model": "talker", "messages": messages("Hi"), "max_tokens": tokens, "stream": stream}
            await beat.elapse(come)
            client = await RawClient(port).ask(body, unsent=20 if way == "half a body" else 0)
            seen = b""
            if way == "later":
                await beat.elapse(go)
            elif way == "reading":
                lines = 1 + go // 5 if stream else 1  # of one that is whole, its end
                seen = b"".join([await client.reader.readline() for _ in range(lines)])
            client.vanish()
            return seen

        alone = [await text(number) for number in range(STEADY)]
        assert len(set(alone)) == STEADY
        before, free = held(), await states(web)
        over = asyncio.Event()
        plans = [
            (
                rng.choice(("at once", "half a body", "later", "reading")),
                rng.random() < 0.6,
                rng.randrange(MOMENTS),
                rng.randrange(MOMENTS),
            )
            for _ in range(CROWD)
        ]

        async def staying(number: int) -> list[str]:
            texts = []
            while not over.is_set():
                texts.append(await text(number))
            return texts

        async with asyncio.TaskGroup() as group:
            steady = [group.create_task(staying(number)) for number in range(STEADY)]
            await beat.elapse(STEADY)
            during = await asyncio.to_thread(held)
            answers = await asyncio.gather(*(vanishing(*plan) for plan in plans))
            over.set()
        for number, task in enumerate(steady):
            assert set(task.result()) == {alone[number]}
        for (way, *_), seen in zip(plans, answers, strict=True):
            assert seen.startswith(b"HTTP/1.1 200 OK") == (way == "reading")

        # What is to be gone at the end can be seen while it is there.
        assert any(one.requests for one in during.values())
        there = {part for one in during.values() for part in one.parts}
        assert there == set(OURS) - (set() if any("#service#" in name for name in during) else {"RemoteStream"})

        while (now := await states(web))["aphoton_requests_running"] or now["aphoton_requests_waiting"]:
            pass
        while any(one.requests for one in held().values()):
            pass
        after = held()
        assert now["aphoton_kv_pages used"] == now["aphoton_zombies"] == 0
        pages = "aphoton_kv_pages free", "aphoton_kv_pages cached"
        assert sum(now[name] for name in pages) == sum(free[name] for name in pages)
        assert now["aphoton_requests_total abort"] > CROWD / 5  # the others had their end, or never reached an engine
        assert not any(one.parts for one in after.values())
        assert before.keys() == after.keys()
        for name, one in after.items():
            assert one.files < before[name].files + 10  # the streams that stayed have connections of their own
