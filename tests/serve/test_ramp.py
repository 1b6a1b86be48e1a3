"""A ramp's load, against clients' streams that cost nothing; and its picture."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from aphoton import AphotonError, InvalidRequest
from aphoton_serve.benchclient import Reply
from aphoton_serve.ramp import Arrival, Course, Look, Ramp
from aphoton_serve.rampplot import draw


def replicas() -> Counter[str]:
    return Counter(RUNNING=2, STARTING=1)


async def test_as_many_clients_as_each_stage_has() -> None:
    stages, turns = [1, 4, 2, 4], 20
    most = [0] * len(stages)
    ramp = Ramp(stages, 0.05, 7)
    streams = 0

    async def ask(tokens: int) -> Reply:
        nonlocal streams
        assert tokens == 7
        streams += 1
        for _ in range(turns):
            await asyncio.sleep(0)
            stage = min(int((asyncio.get_running_loop().time() - began) / 0.05), len(stages) - 1)
            most[stage] = max(most[stage], streams)
        streams -= 1
        return Reply(0.25, 0.5, 7)

    began = asyncio.get_running_loop().time()
    course = await ramp.run(ask, replicas)
    assert streams == 0
    assert most[0] == 1 and most[1] == most[3] == max(most) == 4
    assert course.clients == stages
    assert {(one.ttft, one.error) for one in course.arrivals} == {(0.25, None)}
    assert {(look.running, look.starting, look.stopping) for look in course.looks} == {(2, 1, 0)}


async def test_what_fails_is_noted() -> None:
    async def ask(_: int) -> Reply:
        raise AphotonError("no such luck")

    course = await Ramp([2], 0.05, 7).run(ask, replicas)
    assert [(one.ttft, one.error) for one in course.arrivals] == [(None, "no such luck")] * 2


async def test_a_client_that_breaks_ends_it() -> None:
    async def ask(_: int) -> Reply:
        raise KeyError("a bug")

    with pytest.raises(ExceptionGroup) as group:
        await Ramp([1], 60.0, 7).run(ask, replicas)
    assert group.group_contains(KeyError)


def test_a_stage_takes_time() -> None:
    with pytest.raises(InvalidRequest, match="stage"):
        Ramp([1], 0.0, 7)


@pytest.mark.filterwarnings("ignore")
def test_picture(tmp_path: Path) -> None:
    looks = [
        Look(at=at / 2, streams=at % 7, running=1 + at // 40, starting=at % 40 > 30, stopping=0) for at in range(120)
    ]
    arrivals = [Arrival(at=at / 10, ttft=0.1 + at % 17) for at in range(600)] + [Arrival(at=30.0, error="lost")]
    full, empty = tmp_path / "full.png", tmp_path / "empty.png"
    draw(Course(clients=[1, 6, 1], stage=20.0, looks=looks, arrivals=arrivals), full)
    draw(Course(clients=[1], stage=20.0, looks=[], arrivals=[]), empty)
    for file in (full, empty):
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size < 100_000
    assert full.stat().st_size > empty.stat().st_size
