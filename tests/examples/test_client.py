"""The client with OpenAI's package: of the service in this process, and of one on Ray Serve."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import serving

from aphoton_serve.local import LocalBackend


def check(printed: str, name: str) -> None:
    lines = printed.splitlines()
    assert lines[0] == f"models: {name}"
    (review,) = (line for line in lines if line.startswith("mood="))
    assert review.startswith(("mood='happy' stars=", "mood='neutral' stars=", "mood='angry' stars="))
    assert sum(line.startswith("- ") for line in lines) == 8
    assert any(lines[1 : lines.index(review)])


async def test_with_the_service(example: Any, talker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(LocalBackend({"talker": talker}, device="cpu", dtype="float32")) as served:
        await example("client").main("talker", f"http://127.0.0.1:{served.port}")
    check(capsys.readouterr().out, "talker")


@pytest.fixture
def on_ray(talker: Path) -> Iterator[str]:
    from ray import serve

    from aphoton_serve.app import build
    from aphoton_serve.cluster import local_cluster

    with local_cluster(cpus=2) as url:
        serve.run(build({"model": f"talker={talker}", "device": "cpu", "dtype": "float32", "num_cpus": "0.1"}))
        yield url


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_with_ray(example: Any, on_ray: str, capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    asyncio.run(example("client").main("talker", on_ray))
    check(capsys.readouterr().out, "talker")
