"""Replicas that come and go, with real Ray and real HTTP. Ray takes its time to start, so it is started once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

PORT = 18_439
COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_rows": 4, "max_waiting": 60, "num_cpus": 0.1}
QUICK: dict[str, Any] = {"upscale_delay": 0, "downscale_delay": 1, "look_back": 2, "grace": 60}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray, which tells its autoscaler of requests several times a second."""
    from ray import serve

    with pytest.MonkeyPatch.context() as patch:
        for who in ("REPLICA", "HANDLE"):
            patch.setenv(f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        yield
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def serving(cluster: None) -> Iterator[Callable[..., openai.OpenAI]]:
    """Serves a model with the arguments given, and gives a client of it."""
    from ray import serve

    from aphoton_serve.app import build

    clients = []

    def start(model: str, **args: Any) -> openai.OpenAI:
        serve.run(build({**COMMON, **QUICK, "model": f"it={model}", **args}))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="unused", max_retries=0, timeout=120)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()
    serve.delete("default")


def replicas() -> dict[str, int]:
    """Of the engine, by state."""
    from ray import serve

    deployments = serve.status().applications["default"].deployments
    return dict(deployments["engine-it"].replica_states)


def running() -> int:
    return int(replicas().get("RUNNING", 0))


def until(condition: Callable[[], object]) -> None:
    """Each look takes a call to Serve, and the test's time-out ends what never comes."""
    while not condition():
        os.sched_yield()


def ask(ai: openai.OpenAI, tokens: int) -> int:
    """Tokens of one stream."""
    stream = ai.completions.create(
        model="it",
        prompt="Once",
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    usages = [chunk.usage for chunk in stream if chunk.usage is not None]
    return usages[-1].completion_tokens


def test_one_model_with_one_replica_has_its_endpoints_there(serving: Callable[..., openai.OpenAI]) -> None:
    from ray import serve

    ai = serving("random:tiny")
    assert list(serve.status().applications["default"].deployments) == ["engine-it"]
    assert [model.id for model in ai.models.list()] == ["it"]
    assert ask(ai, 50) == 50
    base = f"http://127.0.0.1:{PORT}"
    assert httpx.get(f"{base}/health").json() == {"status": "ok", "models": {"it": "ok"}}
    with pytest.raises(openai.BadRequestError) as refused:
        ai.completions.create(model="it", prompt=[100_000])
    assert refused.value.param == "prompt"
    with httpx.stream(
        "POST", f"{base}/v1/completions", json={"model": "it", "prompt": "Hi", "max_tokens": 500, "stream": True}
    ) as response:
        next(response.iter_lines())
    until(lambda: 'aphoton_requests_total{model="it",outcome="abort"} 1.0' in httpx.get(f"{base}/metrics").text)


def test_more_and_fewer_replicas_and_no_failed_request(serving: Callable[..., openai.OpenAI]) -> None:
    ai = serving("random:135m", max_replicas=2, target_requests=2)
    assert running() == 1
    enough = threading.Event()

    def client() -> list[int]:
        counts = []
        while not enough.is_set():
            counts.append(ask(ai, 8))
        return counts

    with ThreadPoolExecutor(6) as pool:
        clients: list[Future[list[int]]] = [pool.submit(client) for _ in range(6)]
        try:
            until(lambda: running() == 2 or any(one.done() for one in clients))
        finally:
            enough.set()
        counts = [count for one in clients for count in one.result()]
    assert set(counts) == {8}
    with ThreadPoolExecutor(1) as pool:  # while one goes, another one still answers
        late = pool.submit(lambda: [ask(ai, 8) for _ in range(3)])
        assert late.result() == [8, 8, 8]
    until(lambda: replicas() == {"RUNNING": 1})
    assert ask(ai, 8) == 8


def test_from_none_and_back(serving: Callable[..., openai.OpenAI]) -> None:
    ai = serving("random:tiny", min_replicas=0)
    until(lambda: not replicas())
    assert httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=60).status_code == 200
    assert not replicas()  # nobody has been woken
    assert ask(ai, 8) == 8
    until(lambda: not replicas())


def test_a_replica_that_is_killed_under_load(serving: Callable[..., openai.OpenAI]) -> None:
    """Its streams get a clear error, those of the other one go on, and it is replaced."""
    ai = serving("random:135m", min_replicas=2, max_replicas=2)
    until(lambda: running() == 2)
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if "engine-it" in one["name"]]
    actor = ray.get_actor(names[0], namespace="serve")
    victim = ray.get(actor.__ray_call__.remote(lambda replica: os.getpid()))
    began = threading.Barrier(9, timeout=120)

    def client() -> int | str | None:
        stream = ai.completions.create(
            model="it", prompt="Once", max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        began.wait()
        try:
            return sum(1 for chunk in stream if chunk.choices and chunk.choices[0].finish_reason)
        except openai.APIError as error:
            return error.code

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client) for _ in range(8)]
        began.wait()
        os.kill(victim, signal.SIGKILL)
        ends = [one.result() for one in clients]
    assert set(ends) == {1, "replica_lost"}
    until(lambda: running() == 2)
    assert ask(ai, 4) == 4
