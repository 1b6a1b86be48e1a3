"""Which replica a conversation goes to, what a stream among many sends, and how many replicas a model has."""

from types import SimpleNamespace
from typing import Any, Self

import pytest
from serving import Served

from aphoton import SamplingParams
from aphoton_serve.affinity import BLOCK, Affinity, beginnings
from aphoton_serve.backend import Job, Part
from aphoton_serve.naming import with_adapter
from aphoton_serve.pacing import PacedStream, Pacer
from aphoton_serve.scaling import KV_USE, replicas_wanted

PARAMS = SamplingParams()


def talk(*said: str, adapter: str = "") -> Job:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return Job(params=PARAMS, messages=messages, adapter=adapter)


def test_a_next_turn_knows_the_turns_before() -> None:
    first, second, other = beginnings(talk("a")), beginnings(talk("a", "b", "c")), beginnings(talk("x", "b", "c"))
    assert second[:1] == first and len(second) == 3
    assert not set(second) & set(other)
    with_lora = beginnings(talk("a", adapter="pirate"))
    assert not set(with_lora) & set(first)
    assert beginnings(talk("z", adapter="pirate"))[0] == with_lora[0]


def test_whole_blocks_of_a_prompt() -> None:
    long = beginnings(Job(params=PARAMS, prompt="x" * BLOCK * 2 + "tail"))
    assert len(long) == 2 and beginnings(Job(params=PARAMS, prompt="x" * BLOCK + "other")) == long[:1]
    assert beginnings(Job(params=PARAMS, prompt="short")) == []
    assert len(beginnings(Job(params=PARAMS, prompt=[1] * BLOCK))) == 1


def test_the_longest_beginning_wins() -> None:
    affinity: Affinity[str] = Affinity(capacity=4)
    affinity.note([1, 2, 3], "a")
    affinity.note([1, 9], "b")
    assert affinity.holders([1, 2, 5], {"a", "b"}) == ["a"]
    assert affinity.holders([1, 7], {"a", "b"}) == ["b", "a"]
    assert affinity.holders([1, 2], {"b"}) == ["b"]  # "a" is gone
    assert affinity.holders([8], {"a", "b"}) == []
    affinity.note([4], "a")  # the oldest goes
    assert affinity.holders([2], {"a"}) == []


def test_adapters_by_name() -> None:
    models = ("base", "random:tiny")
    assert with_adapter("base:pirate", models) == ("base", "pirate")
    assert with_adapter("random:tiny:pirate", models) == ("random:tiny", "pirate")
    for asked in ("base", "random:tiny", "nobody:pirate", "pirate"):
        assert with_adapter(asked, models) is None


async def test_an_adapter_is_refused(real: Served) -> None:
    body = {"model": "tiny:pirate", "prompt": "Hi"}
    response = await real.web.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_adapter"
    assert (await real.web.post("/v1/completions", json={**body, "model": "no:pirate"})).status_code == 404


@pytest.mark.parametrize(
    ("replicas", "requests", "use", "wanted"),
    [(1, 0, 0.0, 0), (1, 12, 0.1, 2), (2, 3, 0.8, 2), (2, 6, 0.2, 1), (0, 0, 0.0, 0), (3, 0, 0.5, 0)],
)
def test_replicas_wanted(replicas: int, requests: float, use: float, wanted: float) -> None:
    """By requests, of which each replica is to have six, or by pages, whichever are more."""
    context: Any = SimpleNamespace(
        current_num_replicas=replicas,
        target_num_replicas=0,
        total_num_requests=requests,
        aggregated_metrics={KV_USE: dict.fromkeys(range(replicas), use)},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 6.0),
    )
    assert replicas_wanted(context)[0] == pytest.approx(wanted)


class Parts:
    """A stream that has the parts given, each when it is asked for."""

    def __init__(self, *parts: Part) -> None:
        self._parts = iter(parts)
        self.closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        for part in self._parts:
            return part
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


async def test_a_paced_stream_counts_itself() -> None:
    pacer, inner = Pacer(shortest=0.0), Parts(Part(text="a"), Part(text="b", finish_reason="stop"))
    stream = PacedStream(inner, Job(params=PARAMS, prompt=""), pacer)
    assert pacer.running == 0
    assert [part.text async for part in stream] == ["a", "b"]
    assert pacer.running == 1
    await stream.aclose()
    await stream.aclose()
    assert pacer.running == 0 and inner.closed


def test_the_pause_grows_with_the_crowd() -> None:
    pacer = Pacer(shortest=0.02, longest=0.2, rate=250)
    pauses = []
    for running in (1, 5, 10, 32, 500):
        pacer.running = running
        pauses.append(pacer.interval)
    assert pauses == [0.02, 0.02, 0.04, 0.128, 0.2]
