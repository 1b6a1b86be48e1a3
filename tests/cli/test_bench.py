"""``aphoton bench``: what it reports is there and can be; how fast it was is nobody's business here."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli.running import Run

from aphoton import SimCosts
from aphoton.cli.report import Report

SHORT = ("--prompt-tokens", "6", "--output-tokens", "10", "--warmup", "0")


def _bench(run: Run, folder: Path, *arguments: str) -> tuple[Report, str]:
    """The report read back from its JSON, in which every key must be known, and what was printed."""
    file = folder / "report.json"
    result = run("bench", *arguments, "--json", str(file))
    raw = msgspec.json.decode(file.read_bytes())
    assert set(raw) == set(Report.__struct_fields__)
    report = msgspec.convert(raw, Report)
    assert report.machine.cores >= 1 and report.machine.torch and report.machine.cpu
    assert report.machine.cpu in result.stdout
    return report, result.stdout


def _check_runs(report: Report) -> None:
    for run in report.runs:
        assert len(run.tok_s_rounds) == report.rounds
        assert min(run.tok_s_rounds) <= run.tok_s <= max(run.tok_s_rounds)
        assert run.tok_s > 0
        for spread in (run.ttft, run.itl):
            assert spread is not None and 0 < spread.p50 <= spread.p99 <= spread.max
        assert set(run.phases_ms) == {"launch", "wait", "commit", "sample"}
        assert all(time >= 0 for time in run.phases_ms.values())
        assert run.steps >= report.workload.output_tokens
        assert run.step_ms is not None and run.device_ms is not None
        assert 0 <= run.idle_share < 1
        assert run.zombies == 0  # the end was foreseen


def test_dtypes_depths_and_transformers(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    report, text = _bench(
        run, tmp_path, "random:tiny", *SHORT, "--kernels", "torch", "--concurrency", "1,3", "--depth", "1,2",
        "--dtype", "float32,bfloat16", "--rounds", "2", "--against", "transformers", "--heartbeat",
    )  # fmt: skip
    _check_runs(report)
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
    report, _ = _bench(
        run, tmp_path, "random:tiny", *SHORT, "--concurrency", "2", "--rounds", "1", "--no-stream", "--requests", "5"
    )
    _check_runs(report)
    (figures,) = report.runs
    assert figures.measured_at == "engine" and figures.tokens_per_piece is None
    assert report.workload.requests == 5
    assert not report.transformers and report.memory is None and report.cost_model is None


def test_heartbeat_is_beside_eight_streams(run: Run, tmp_path: Path) -> None:
    report, _ = _bench(run, tmp_path, "random:tiny", *SHORT, "--rounds", "1", "--heartbeat")
    assert [run.concurrency for run in report.runs] == [8]


def test_memory(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    report, text = _bench(
        run, tmp_path, "random:tiny", "--memory", "--requests", "40", "--concurrency", "4", "--kernels", "torch"
    )
    memory = report.memory
    assert memory is not None
    assert (memory.requests, memory.concurrency, len(memory.samples)) == (40, 4, 10)
    assert memory.growth == pytest.approx(memory.samples[-1] - memory.after_warmup)
    assert 0 < memory.before <= memory.first_peak
    assert memory.after_warmup <= memory.first_peak and memory.second_peak > 0
    assert "second engine, peak" in text and not report.runs


def test_simulated_device_follows_the_cost_model(run: Run, tmp_path: Path) -> None:
    costs = {"launch": 0.4, "forward": 3.0, "sampling": 0.2, "copy": 0.1, "commit": 0.6}
    options = [text for name, value in costs.items() for text in (f"--cost-{name}", str(value))]
    report, text = _bench(run, tmp_path, "--device", "sim", *SHORT, "--concurrency", "1,4", *options)
    _check_runs(report)
    assert report.model == "sim" and report.device == "sim" and report.rounds == 1
    periods = {(run.depth, run.concurrency): run.step_ms for run in report.runs}
    assert periods == pytest.approx({(1, 1): 4.3, (1, 4): 4.3, (2, 1): 3.2, (2, 4): 3.2})
    assert report.cost_model is not None
    assert report.cost_model.costs == pytest.approx(costs | {"forward_token": 0.0})
    assert "Zombie tax" in text and "max(device, host)" in text


def test_costs_are_milliseconds_of_the_models_seconds(run: Run, tmp_path: Path) -> None:
    report, _ = _bench(run, tmp_path, "--device", "sim", *SHORT, "--concurrency", "1", "--depth", "1")
    costs: dict[str, Any] = {} if report.cost_model is None else report.cost_model.costs
    assert costs == pytest.approx({name: getattr(SimCosts(), name) * 1e3 for name in costs}) and len(costs) == 6
