"""The Ray Serve application: real Ray, real HTTP. Ray takes its time to start, so it is started once."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aphoton import Engine, InvalidRequest

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Three models behind one endpoint, given as on a command line."""
    from ray import serve
    from talker import make_talker

    from aphoton_serve.app import build
    from aphoton_serve.cluster import local_cluster

    folder = make_talker(tmp_path_factory.mktemp("talker"))
    common = {"device": "cpu", "dtype": "float32", "max_rows": "4", "max_waiting": "4", "num_cpus": "0.1"}
    models = [
        {"model": "tiny=random:tiny", "max_replicas": "2"},
        {"model": "slow=random:135m"},
        {"model": f"talker={folder}", "max_model_len": "512"},
    ]
    with local_cluster(cpus=4) as url:
        serve.run(build({**common, "models": models, "tick_timeout": "30", "grace": "20"}))
        yield url


@pytest.fixture
def ai(service: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def samples(service: str, name: str, **labels: str) -> dict[str, float]:
    """Of a metric of the model ``slow``, by replica."""
    families = text_string_to_metric_families(httpx.get(f"{service}/metrics", timeout=60).text)
    wanted = {"model": "slow", **labels}.items()
    return {
        sample.labels["replica"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and wanted <= sample.labels.items()
    }


def until(condition: Callable[[], object]) -> None:
    """Each look takes a request, and the test's time-out ends what never comes."""
    while not condition():
        time.sleep(0)


def test_models_and_health(service: str, ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["tiny", "slow", "talker"]
    assert httpx.get(f"{service}/health", timeout=60).json() == {
        "status": "ok",
        "models": {"tiny": "ok", "slow": "ok", "talker": "ok"},
    }
    assert "<!doctype html>" in httpx.get(service, timeout=60).text


def test_the_same_text_as_the_engine(ai: openai.OpenAI) -> None:
    async def direct() -> str:
        async with Engine("random:tiny", device="cpu", dtype="float32") as engine:
            return (await engine.generate("Once", max_tokens=40)).text

    expected = asyncio.run(direct())
    whole = ai.completions.create(model="tiny", prompt="Once", max_tokens=40, temperature=0)
    assert whole.choices[0].text == expected
    chunks = list(ai.completions.create(model="tiny", prompt="Once", max_tokens=40, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert len(chunks) < 40  # merged


def test_chat(ai: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "talker", "messages": HI, "max_tokens": 8, "temperature": 0}
    whole = ai.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 8
    stream = list(ai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream[:-1])
    assert text == whole.choices[0].message.content
    assert stream[-1].usage is not None and stream[-1].usage.completion_tokens == 8


def test_errors(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ai.completions.create(model="nobody", prompt="Hi")
    with pytest.raises(openai.BadRequestError) as ids:  # found out by the engine, in another process
        ai.completions.create(model="tiny", prompt=[100_000])
    assert ids.value.param == "prompt" and "token ids must be from 0" in ids.value.message
    with pytest.raises(openai.BadRequestError) as early:
        ai.completions.create(model="tiny", prompt=[100_000], stream=True)
    assert early.value.param == "prompt"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes(service: str, stream: bool) -> None:
    def aborted() -> float:
        return sum(samples(service, "aphoton_requests_total", outcome="abort").values())

    def running() -> list[float]:
        return [*samples(service, "aphoton_requests_running").values()]

    before = aborted()
    body = {"model": "slow", "prompt": "Hi", "max_tokens": 2000, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{service}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()  # kept: dropping it closes the response
            assert next(lines).startswith("data: ")
            assert running() == [1]
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{service}/v1/completions", json=body, timeout=httpx.Timeout(60, read=2))
    until(lambda: running() == [0])
    until(lambda: [*samples(service, "aphoton_kv_use_ratio").values()] == [0])
    assert aborted() == before + 1


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({}, "args"),
        ({"model": "x", "max_rows": "0"}, "max_rows"),
        ({"model": "x", "max_rows": "many"}, "max_rows"),
        ({"model": "x", "speed": "1"}, "speed"),
        ({"model": "x", "min_replicas": "3"}, "max_replicas"),
        ({"model": "x", "request_timeout": "0"}, "request_timeout"),
        ({"models": []}, "models"),
        ({"models": [{"model": "a"}, {"model": "b/a"}]}, "model"),
    ],
)
def test_arguments_that_cannot_be(args: dict[str, Any], field: str) -> None:
    from aphoton_serve.app import build

    with pytest.raises(InvalidRequest) as refused:
        build(args)
    assert refused.value.field == field


def test_a_replica_that_is_killed(service: str, ai: openai.OpenAI) -> None:
    """Its streams get a clear error, and another one takes its place, with metrics of its own."""
    (before,) = samples(service, "aphoton_engine_up")
    stream = ai.completions.create(model="slow", prompt="Hi", max_tokens=2000, stream=True)
    next(stream)
    actors = ray.util.list_named_actors(all_namespaces=True)
    (name,) = [one["name"] for one in actors if "engine-slow" in one["name"]]
    assert name.endswith(before)
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)
    with pytest.raises(openai.APIError, match="was lost") as lost:
        for _ in stream:
            pass
    assert lost.value.code == "replica_lost"

    def answers() -> bool:
        try:
            return ai.completions.create(model="slow", prompt="Hi", max_tokens=2).choices[0].finish_reason == "length"
        except openai.InternalServerError:
            return False

    until(answers)
    (after,) = samples(service, "aphoton_engine_up")
    assert after != before
    assert samples(service, "aphoton_requests_total") == {after: 1}
