"""The pipeline pays as the theory says: what ``aphoton bench --device sim`` measures."""

from pathlib import Path

import pytest
from cli.benching import SHORT, check_runs, read_bench
from cli.running import Run

COSTS = {"launch": 0.4, "forward": 3.0, "forward_token": 0.01, "sampling": 0.2, "copy": 0.1, "commit": 0.6}
"""In milliseconds."""


def test_simulated_device_follows_the_cost_model(run: Run, tmp_path: Path) -> None:
    options = [text for name, cost in COSTS.items() for text in (f"--cost-{name.replace('_', '-')}", str(cost))]
    report, text = read_bench(run, tmp_path, "--device", "sim", *SHORT, "--concurrency", "1,4", *options)
    check_runs(report)
    assert report.model == "sim" and report.device == "sim" and report.rounds == 1
    steps = {(run.depth, run.concurrency): run.step_ms for run in report.runs}
    assert steps == pytest.approx({(1, 1): 4.31, (1, 4): 4.34, (2, 1): 3.21, (2, 4): 3.24})
    assert all(0.2 < run.idle_share < 0.26 for run in report.runs if run.depth == 1)
    assert all(run.idle_share == 0 for run in report.runs if run.depth == 2)

    model = report.cost_model
    assert model is not None
    assert model.costs == pytest.approx(COSTS)
    for period in model.periods:
        assert period.blocking == pytest.approx(period.blocking_theory, rel=0.01)
        assert period.pipelined == pytest.approx(period.pipelined_theory, rel=0.05)  # near it
        assert period.pipelined < period.blocking
    for side in ("host", "device"):
        assert any(period.pipelined_theory == getattr(period, side) for period in model.periods)

    one = [tax for tax in model.taxes if tax.streams == 1]
    assert [tax.length for tax in one] == [8, 32, 128]
    for tax in one:
        assert tax.theory == pytest.approx(1 / tax.length)
        assert tax.time == pytest.approx(tax.theory, rel=0.1)
        assert tax.zombie_rows == pytest.approx(1 / tax.length)
    full = [tax for tax in model.taxes if tax.rows > tax.streams > 1]
    queued = [tax for tax in model.taxes if tax.rows < tax.streams]
    assert [tax.length for tax in full] == [tax.length for tax in queued] == [8, 32]
    for tax in full:
        assert tax.zombie_rows == pytest.approx(1 / tax.length, rel=0.1)
        assert 0 <= tax.time < 0.4 / tax.length  # the last batch is not full, and a row costs a little
    for tax in queued:
        assert tax.time == pytest.approx(tax.theory, rel=0.3)

    for heading in ("Cost model", "max(device, host)", "Zombie tax", "times are virtual"):
        assert heading in text
