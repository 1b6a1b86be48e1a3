"""``aphoton bench --soak``: all that is sent is accounted for, and what must not be ends the command with an error."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from cli.benching import read_bench
from cli.running import Run
from engine.waiting import idle

from aphoton import Engine, SamplingParams, SimModel
from aphoton.cli.load import Load, Times
from aphoton.cli.mix import Ask, Way, mixed
from aphoton.cli.plan import Plan
from aphoton.cli.soak import Soak
from aphoton.cli.workload import Workload
from aphoton.device.sim import SimDevice
from aphoton.kv import PageTable

pytest.importorskip("psutil")

BRIEF = ("--soak", "0.5", "--concurrency", "4", "--prompt-tokens", "40", "--output-tokens", "12")


def check(soak: Soak | None) -> Soak:
    assert soak is not None
    assert soak.requests == soak.finished + sum(soak.cancelled.values()) >= 1
    assert not soak.failed and not soak.problems()
    assert (soak.pages_used, soak.rows, soak.zombies, soak.died) == (0, 0, 0, None)
    assert soak.rate == pytest.approx(0.9 * soak.capacity) and soak.capacity > 0
    assert soak.seconds >= 0.5
    assert [sample.at for sample in soak.memory] == sorted(sample.at for sample in soak.memory)
    assert len(soak.memory) == 12 and soak.memory[0].at == 0
    assert soak.growth == {"resident": soak.memory[-1].mib["resident"] - soak.memory[0].mib["resident"]}
    assert soak.most_running <= 4
    return soak


def test_everything_ends_and_comes_back(run: Run, tmp_path: Path) -> None:
    report, text = read_bench(run, tmp_path, "random:tiny", *BRIEF, "--kernels", "torch")
    soak = check(report.soak)
    assert (soak.dtype, soak.kernels, soak.depth, soak.concurrency) == ("float32", "torch", 2, 4)
    assert (report.workload.prompt_tokens, report.workload.output_tokens) == (40, 12)
    assert not report.runs and report.memory is None
    for heading in ("capacity", "before any token", "most running / waiting", "Memory in MiB", "growth"):
        assert heading in text


def test_on_the_simulated_device(run: Run, tmp_path: Path) -> None:
    report, text = read_bench(run, tmp_path, "--device", "sim", *BRIEF, "--depth", "1")
    assert report.model == "sim" and check(report.soak).depth == 1
    assert "all times are real" in text


def test_memory_of_a_gpu(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "device", property(lambda self: "cuda"))
    amounts = itertools.count(100 << 20, 1 << 20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(amounts))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 4 << 30))
    report, text = read_bench(run, tmp_path, "--device", "sim", *BRIEF)
    assert report.soak is not None
    growth = {name: growth for name, growth in report.soak.growth.items() if name != "resident"}
    assert growth == {"reserved": 11, "allocated": 0, "used": 0}
    assert report.soak.memory[0].mib["used"] == 1024
    assert "reserved" in text and "+11.0" in text


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--memory",), "memory"),
        (("--requests", "5"), "requests"),
        (("--concurrency", "1,2"), "concurrency"),
        (("--max-model-len", "51"), "prompt_tokens"),
        (("--kv-pages", "3"), "prompt_tokens"),
    ],
)
def test_what_does_not_go_with_it(run: Run, options: tuple[str, ...], field: str) -> None:
    assert f"error: {field}: " in run("bench", "random:tiny", *BRIEF, *options, code=2).output


@pytest.mark.parametrize("moment", ["calibrate", "send"])
def test_an_engine_that_dies(run: Run, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    launch, phase, began = SimDevice.launch, getattr(Load, moment), []

    def fail(self: SimDevice, *args: Any) -> None:
        if began:
            raise RuntimeError("the simulated bus is on fire")
        launch(self, *args)

    def begin(self: Load, *args: Any) -> Any:
        began.append(moment)
        return phase(self, *args)

    monkeypatch.setattr(SimDevice, "launch", fail)
    monkeypatch.setattr(Load, moment, begin)
    output = run("bench", "--device", "sim", *BRIEF, code=1).output
    assert "requests failed: EngineDead" in output and "the simulated bus is on fire" in output
    assert "capacity 0.0" in output if moment == "calibrate" else "capacity 0.0" not in output


def test_a_page_that_does_not_come_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clear = PageTable.clear
    monkeypatch.setattr(PageTable, "clear", lambda self, row: clear(self, row)[1:])
    assert "error: the engine has died: AssertionError" in run("bench", "--device", "sim", *BRIEF, code=1).output


def test_problems(run: Run, tmp_path: Path) -> None:
    soak = read_bench(run, tmp_path, "--device", "sim", *BRIEF)[0].soak
    assert soak is not None
    bad = msgspec.structs.replace(soak, pages_used=3, rows=1, failed={"EngineDead: of old age": 2})
    assert bad.problems() == [
        "2 requests failed: EngineDead: of old age",
        "3 KV pages did not come back",
        "1 rows did not come back",
    ]


def test_requests_are_of_all_kinds() -> None:
    work = Workload(prompt_tokens=50, output_tokens=20, seed=3)
    asks = list(itertools.islice(mixed(work, 300), 3000))
    assert asks[:50] == list(itertools.islice(mixed(work, 300), 50)), "a seed gives the same requests"
    assert {len(ask.prompt) for ask in asks} == set(range(1, 51))
    assert np.median([len(ask.prompt) for ask in asks]) < 15
    assert {ask.params.max_tokens for ask in asks} == set(range(1, 21))
    assert {token for ask in asks for token in ask.prompt} == set(range(300))
    given_up = [ask for ask in asks if ask.way is not None]
    assert 0.07 < len(given_up) / len(asks) < 0.13
    assert {ask.way for ask in given_up} == set(get_args(Way))
    assert any(ask.moment == 0 for ask in given_up) and all(0 <= ask.moment < 1 for ask in given_up)
    for fields in ("temperature", "top_p", "top_k", "seed", "logprobs", "stop_token_ids", "min_tokens", "ignore_eos"):
        values = {getattr(ask.params, fields) for ask in asks}
        assert len(values) > 1, fields


@pytest.mark.parametrize("way", get_args(Way))
async def test_ways_of_giving_up(way: Way) -> None:
    params = SamplingParams(max_tokens=3000, ignore_eos=True)
    async with Engine(SimModel(), max_rows=1) as engine:
        load = Load(engine, Workload())
        # The second waits for a row.
        asks = [Ask(prompt=[1, 2], params=params, way=way, moment=0.0) for _ in range(2)]
        await asyncio.gather(*map(load.request, asks))
        seen = load.seen
        assert (seen.requests, seen.finished, seen.failed) == (2, 0, {})
        assert seen.cancelled == {way: 2} and 1 <= seen.unseen <= 2
        await load.request(Ask(prompt=[1, 2], params=SamplingParams(max_tokens=3, logprobs=1), way=None, moment=0.0))
        assert seen.finished + sum(seen.failed.values()) == 1
        await idle(engine)


async def test_somebody_elses_cancellation_goes_on() -> None:
    async with Engine(SimModel()) as engine:
        load = Load(engine, Workload())
        ask = Ask(prompt=[1], params=SamplingParams(max_tokens=3000, ignore_eos=True), way=None, moment=0.0)
        task = asyncio.create_task(load.request(ask))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (load.seen.requests, load.seen.finished, load.seen.cancelled, load.seen.failed) == (1, 0, {}, {})
        await idle(engine)


async def test_a_request_that_is_refused_counts() -> None:
    async with Engine(SimModel(vocab_size=300)) as engine:
        load = Load(engine, Workload())
        for _ in range(30):
            await load.request(Ask(prompt=[300], params=SamplingParams(), way=None, moment=0.0))
        ((error, count),) = load.seen.failed.items()
        assert count == 30 and error.startswith("InvalidRequest: prompt")
        assert not load.over


def test_times() -> None:
    times = Times()
    assert times.spread() is None
    seconds = np.random.default_rng(0).lognormal(-5, 2, 5000)
    for one in (0.0, 1e9, *seconds.tolist()):
        times.add(one)
    spread = times.spread()
    assert spread is not None
    p50, p99 = np.percentile([0.0, 1e9, *seconds], (50, 99), method="inverted_cdf") * 1e3
    assert (spread.p50, spread.p99, spread.max) == pytest.approx((p50, p99, 1e12), rel=0.02)
