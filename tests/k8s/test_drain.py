"""A worker that ends: the stream that it runs goes on to its end, and its replica is replaced elsewhere."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from k8s.kustomizing import FOLDER

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

PORT = 18_463
TOKENS = 600


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a cluster of a head that runs nothing and two workers, with one replica."""
    from ray import serve
    from ray.cluster_utils import Cluster

    from aphoton_serve.app import build

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    # The nodes are one machine, which has room for one proxy.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    args = {"model": "slow=random:135m", "device": "cpu", "dtype": "float32", "max_rows": 4, "max_model_len": 1024}
    serve.run(build({**args, "num_cpus": 0.5, "grace": 200}))
    yield cluster.address
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def place() -> str:
    """The node of the engine's replica that takes requests."""
    from ray.util.state import list_actors

    actors = list_actors(filters=[("state", "=", "ALIVE")], limit=1000)
    (node,) = {actor.node_id for actor in actors if "engine-slow" in actor.class_name}
    return str(node)


def test_a_worker_ends_when_its_streams_have(address: str) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="unused", max_retries=0) as ai:
        request: Any = {"model": "slow", "prompt": "Once", "extra_body": {"ignore_eos": True}}
        stream = ai.completions.create(
            **request, max_tokens=TOKENS, stream=True, stream_options={"include_usage": True}
        )
        assert next(stream).choices[0].finish_reason is None
        node = place()
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = [sys.executable, str(FOLDER / "drain.py"), "300", node]
        hook = subprocess.Popen(command, env={**os.environ, "PATH": paths, "RAY_ADDRESS": address})
        reason, tokens = None, 0
        for chunk in stream:
            assert hook.poll() is None, "it must not end while the stream runs"
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        assert (reason, tokens) == ("length", TOKENS)
        assert hook.wait() == 0
        assert place() != node
        assert ai.completions.create(**request, max_tokens=4).choices[0].finish_reason == "length"
