"""``aphoton bench``: what it reports is there and can be; how fast it was is nobody's business here."""

from pathlib import Path

import pytest
from cli.benching import SHORT, check_runs, read_bench
from cli.running import Run

from aphoton import Engine
from aphoton.cli.workload import Round, Workload


def test_dtypes_depths_and_transformers(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    report, text = read_bench(
        run, tmp_path, "random:tiny", *SHORT, "--kernels", "torch", "--concurrency", "1,3", "--depth", "1,2",
        "--dtype", "float32,bfloat16", "--rounds", "2", "--against", "transformers", "--heartbeat",
    )  # fmt: skip
    check_runs(report)
    assert report.device == "cpu" and report.settings == {"kernels": "torch"}
    engines = [(run.dtype, run.depth, run.concurrency) for run in report.runs]
    assert engines == [(t, d, c) for t in ("float32", "bfloat16") for d in (1, 2) for c in (1, 3)]
    assert {(run.kernels, run.measured_at) for run in report.runs} == {("torch", "consumer")}
    assert all(run.tokens_per_piece is not None and run.tokens_per_piece >= 1 for run in report.runs)
    assert all(run.heartbeat is not None and 1 <= run.heartbeat.p50 <= run.heartbeat.max for run in report.runs)
    assert report.idle_heartbeat is not None and report.idle_heartbeat.beats > 10
    assert report.rates is not None and report.rates.read_gb_s > 0.1 and report.rates.gflop_s > 0.1
    assert all(run.bound is not None and run.bound.near > 0 for run in report.runs)

    exact, rounded = report.transformers
    assert (exact.dtype, exact.tokens, exact.tokens_equal) == ("float32", 10, 10)
    assert (rounded.dtype, rounded.tokens) == ("bfloat16", 10)
    same = [ratio for ratio in report.ratios if not ratio.best]
    assert [(ratio.ours, ratio.depth, ratio.concurrency) for ratio in same] == engines
    assert all(ratio.ours == ratio.theirs for ratio in same)
    ours = {(run.dtype, run.depth, run.concurrency): run.tok_s_rounds for run in report.runs}
    for ratio in same:
        theirs = exact if ratio.theirs == "float32" else rounded
        pairs = zip(ours[ratio.ours, ratio.depth, ratio.concurrency], theirs.tok_s_rounds, strict=True)
        assert ratio.rounds == pytest.approx([a / b for a, b in pairs])
    assert len(report.ratios) - len(same) == 4
    for heading in ("float32, torch kernels, depth 1", "Heartbeat", "Bound", "transformers 5", "Ours over"):
        assert heading in text


def test_awaiting_completions(run: Run, tmp_path: Path) -> None:
    report, _ = read_bench(
        run, tmp_path, "random:tiny", *SHORT, "--concurrency", "2", "--rounds", "1", "--no-stream", "--requests", "5"
    )
    check_runs(report)
    (figures,) = report.runs
    assert figures.measured_at == "engine" and figures.tokens_per_piece is None
    assert report.workload.requests == 5
    assert not report.transformers and report.memory is None and report.cost_model is None


def test_heartbeat_is_beside_eight_streams(run: Run, tmp_path: Path) -> None:
    report, _ = read_bench(run, tmp_path, "random:tiny", *SHORT, "--rounds", "1", "--heartbeat")
    assert [run.concurrency for run in report.runs] == [8]


def test_a_shared_prefix_with_the_cache_and_without(run: Run, tmp_path: Path) -> None:
    report, text = read_bench(
        run, tmp_path, "sim", "--device", "sim", "--shared-prefix", "60", "--prompt-tokens", "100",
        "--output-tokens", "12", "--rounds", "2",
        "--depth", "2", "--cost-forward-token", "0.1",
    )  # fmt: skip
    check_runs(report)
    assert (report.workload.prompt_tokens, report.workload.shared_prefix) == (100, 60)
    without, cached = report.runs
    assert [run.variant for run in report.runs] == ["no prefix cache", "prefix cache"]
    assert without.concurrency == cached.concurrency == 32
    assert without.ttft is not None and cached.ttft is not None
    assert cached.ttft.p50 < without.ttft.p50, "its tokens cost nothing, and cost the others time"
    assert min(cached.tok_s_rounds) == pytest.approx(max(cached.tok_s_rounds), rel=0.01), (
        "no round knows the last one's"
    )
    assert "no prefix cache" in text and "first 60 tokens" in text


def test_conversations_with_the_cache_and_without(run: Run, tmp_path: Path) -> None:
    report, text = read_bench(
        run, tmp_path, "sim", "--device", "sim", "--turns", "3", "--prompt-tokens", "50", "--output-tokens", "20",
        "--rounds", "2", "--depth", "2", "--cost-forward-token", "0.1",
    )  # fmt: skip
    check_runs(report)
    without, cached = report.runs
    assert [run.variant for run in report.runs] == ["no prefix cache", "prefix cache"]
    assert without.concurrency == cached.concurrency == 8
    assert without.ttft is not None and cached.ttft is not None
    # Of the last turn's 190 tokens 144 or more are there; each costs 0.1 ms, for all of 8 streams in a step or two.
    assert cached.ttft.p50 < without.ttft.p50 / 2
    assert "conversations of 3 turns" in text


@pytest.mark.parametrize("more", [("--turns", "2"), ("--shared-prefix", "32")])
def test_nothing_that_was_run_before_is_asked_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, str]
) -> None:
    """Neither in another round, nor with another number of streams: the cache would have all of it."""
    cached: list[int] = []
    original = Workload.run

    async def spy(work: Workload, engine: Engine, concurrency: int) -> Round:
        round_ = await original(work, engine, concurrency)
        cached.extend(done.usage.cached_tokens for (_, turn), done in round_.completions.items() if not turn)
        return round_

    monkeypatch.setattr(Workload, "run", spy)
    read_bench(
        run, tmp_path, "sim", "--device", "sim", "--concurrency", "1,2", "--rounds", "2", "--depth", "2",
        "--prompt-tokens", "80", "--output-tokens", "4", "--warmup", "0", *more,
    )  # fmt: skip
    assert len(cached) >= 2 * 2 * 3
    assert max(cached) <= 32, "of 80 tokens no more than all share"


def test_shares_of_constrained_requests(run: Run, tmp_path: Path) -> None:
    report, text = read_bench(
        run, tmp_path, "random:tiny", *SHORT, "--concurrency", "4", "--rounds", "1", "--constrained", "0,50,100"
    )
    check_runs(report, together=False)  # a grammar is compiled first, and the others may have ended by then
    assert [run.variant for run in report.runs] == ["0% constrained", "50% constrained", "100% constrained"]
    assert "50% constrained" in text


@pytest.mark.parametrize(("share", "expected"), [(0, 0), (25, 8), (50, 16), (99, 31), (100, 32)])
def test_constrained_requests_are_spread_evenly(share: int, expected: int) -> None:
    work = Workload(constrained=share)
    chosen = [work.params(index).constrained for index in range(32)]
    assert sum(chosen) == expected
    assert abs(sum(chosen[:16]) - sum(chosen[16:])) <= 1


def test_long_prompts_beside_streams(run: Run, tmp_path: Path) -> None:
    report, text = read_bench(
        run, tmp_path, "random:tiny", "--long-prompts", "300", "--prompt-tokens", "6", "--output-tokens", "200",
        "--concurrency", "2", "--max-step-tokens", "50", "--warmup", "0",
    )  # fmt: skip
    alone, chunked, whole = report.interruptions
    assert (alone.budget, chunked.budget, whole.budget) == (50, 50, 312)
    assert alone.prompts is None and alone.ttft is None
    for beside in (chunked, whole):
        assert beside.prompts and beside.ttft is not None and beside.ttft.p50 > 0
    assert all(0 < one.itl.p50 <= one.itl.p99 <= one.itl.max and one.tok_s > 0 for one in report.interruptions)
    assert "long prompts that arrive" in text and not report.runs


@pytest.mark.parametrize(
    "arguments",
    [
        ("--long-prompts", "9", "--rounds", "2"),
        ("--long-prompts", "9", "--output-tokens", "1"),
        ("--long-prompts", "9", "--memory"),
        ("--constrained", "101"),
        ("--constrained", "some"),
        ("--shared-prefix", "6", "--prompt-tokens", "6"),
        ("--shared-prefix", "6", "--memory"),
        ("--constrained", "50", "--soak", "1"),
        ("--shared-prefix", "6", "--prefix-cache"),
        ("--turns", "2", "--memory"),
        ("--turns", "2", "--no-prefix-cache"),
    ],
    ids=str,
)
def test_what_does_not_go_together(run: Run, arguments: tuple[str, ...]) -> None:
    assert "error: " in run("bench", "random:tiny", *arguments, code=2).stderr


def test_memory(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    report, text = read_bench(run, tmp_path, "random:tiny", "--memory", "--requests", "40", "--concurrency", "4")
    memory = report.memory
    assert memory is not None
    assert (memory.requests, memory.concurrency, len(memory.samples)) == (40, 4, 10)
    assert abs(memory.growth) < memory.first_peak
    assert 0 < memory.before <= memory.first_peak
    assert memory.after_warmup <= memory.first_peak and memory.second_peak > 0
    assert "second engine, peak" in text and not report.runs
