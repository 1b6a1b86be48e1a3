"""Replicas that come and go, with real Ray and real HTTP. Ray takes its time to start, so it is started once."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_rows": 4, "max_waiting": 60, "num_cpus": 0.1}
LOST = "the replica that served this request was lost: try again"
QUICK: dict[str, Any] = {"upscale_delay": 0, "downscale_delay": 1, "look_back": 2, "grace": 60}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    from aphoton_serve.cluster import local_cluster

    with local_cluster(cpus=4) as url:
        yield url


@pytest.fixture
def serving(cluster: str) -> Iterator[Callable[..., openai.OpenAI]]:
    """Serves a model with the arguments given, and gives a client of it."""
    from ray import serve

    from aphoton_serve.app import build

    clients = []

    def start(model: str, **args: Any) -> openai.OpenAI:
        serve.run(build({**COMMON, **QUICK, "model": f"it={model}", **args}))
        client = openai.OpenAI(base_url=f"{cluster}/v1", api_key="unused", max_retries=0, timeout=120)
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


def engines() -> list[str]:
    """Names of the replicas' actors."""
    return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if "engine-it" in one["name"]]


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


def test_one_model_with_one_replica_has_its_endpoints_there(
    cluster: str, serving: Callable[..., openai.OpenAI]
) -> None:
    from ray import serve

    ai = serving("random:tiny")
    assert list(serve.status().applications["default"].deployments) == ["engine-it"]
    assert [model.id for model in ai.models.list()] == ["it"]
    assert ask(ai, 50) == 50
    assert httpx.get(f"{cluster}/health").json() == {"status": "ok", "models": {"it": "ok"}}
    with pytest.raises(openai.BadRequestError) as refused:
        ai.completions.create(model="it", prompt=[100_000])
    assert refused.value.param == "prompt"
    with httpx.stream(
        "POST", f"{cluster}/v1/completions", json={"model": "it", "prompt": "Hi", "max_tokens": 500, "stream": True}
    ) as response:
        next(response.iter_lines())
    until(lambda: 'aphoton_requests_total{model="it",outcome="abort"} 1.0' in httpx.get(f"{cluster}/metrics").text)


def test_more_and_fewer_replicas_and_no_failed_request(serving: Callable[..., openai.OpenAI]) -> None:
    """From one to three and back, as clients come and go. What fails raises in its client."""
    ai = serving("random:135m", max_replicas=3, target_requests=2)
    assert running() == 1
    most: list[int] = []

    def client(enough: threading.Event) -> list[int]:
        counts = []
        while not enough.is_set():
            counts.append(ask(ai, 8))
        return counts

    with ThreadPoolExecutor(9) as pool:
        crowd_over, over = threading.Event(), threading.Event()
        crowd = [pool.submit(client, crowd_over) for _ in range(8)]
        last = pool.submit(client, over)
        clients: list[Future[list[int]]] = [*crowd, last]

        def reached(states: dict[str, int]) -> Callable[[], bool]:
            def look() -> bool:
                now = replicas()
                most.append(now.get("RUNNING", 0))
                return now == states or any(one.done() and one.exception() for one in clients)

            return look

        try:
            until(reached({"RUNNING": 3}))
            crowd_over.set()  # one goes on, while the replicas that are too many end
            until(reached({"RUNNING": 1}))
        finally:
            crowd_over.set()
            over.set()
        counts = [one.result() for one in clients]
    assert all(set(count) == {8} for count in counts)
    assert max(most) == 3 and replicas() == {"RUNNING": 1}
    assert ask(ai, 8) == 8


def test_from_none_and_back(cluster: str, serving: Callable[..., openai.OpenAI]) -> None:
    ai = serving("random:tiny", min_replicas=0)
    until(lambda: not replicas())
    assert httpx.get(f"{cluster}/health", timeout=60).status_code == 200
    assert not replicas()  # nobody has been woken
    assert ask(ai, 8) == 8
    until(lambda: not replicas())


def test_a_replica_that_is_killed_under_load(serving: Callable[..., openai.OpenAI]) -> None:
    """Its streams get a clear error, those of the other one go on, and it is replaced."""
    ai = serving("random:135m", min_replicas=2, max_replicas=2, max_rows=8)
    until(lambda: running() == 2)
    names = engines()
    actor = ray.get_actor(names[0], namespace="serve")
    victim = ray.get(actor.__ray_call__.remote(lambda replica: os.getpid()))
    began, killed = threading.Semaphore(0), threading.Event()

    def client() -> str:
        """Reads on until the other replica has been dead for a while, or until it hears that its own is."""
        later = 0
        with ai.completions.create(
            model="it", prompt="Once", max_tokens=5000, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            began.release()  # the response begins with the first token
            try:
                for _ in stream:
                    later += killed.is_set()
                    if later == 20:
                        break
            except openai.APIError as error:
                return error.message
        return "goes on" if later == 20 else "ended"

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client) for _ in range(6)]
        for _ in clients:
            began.acquire()
        lost = ray.get(actor.get_num_ongoing_requests.remote())
        os.kill(victim, signal.SIGKILL)
        killed.set()
        ends = Counter(one.result() for one in clients)
    assert 0 < lost < 6
    assert ends == {LOST: lost, "goes on": 6 - lost}
    until(lambda: running() == 2 and not set(engines()) & {names[0]})
    assert set(engines()) & set(names) == {names[1]}
    assert ask(ai, 4) == 4
