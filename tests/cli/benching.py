"""A report of ``aphoton bench``, read back, and what holds in every one."""

from pathlib import Path

import msgspec
from cli.running import Run

from aphoton.cli.report import Report

__all__ = ["SHORT", "check_runs", "read_bench"]

SHORT = ("--prompt-tokens", "6", "--output-tokens", "10", "--warmup", "0")


def read_bench(run: Run, folder: Path, *arguments: str) -> tuple[Report, str]:
    """The report read back from its JSON, in which every key must be known, and what was printed."""
    file = folder / "report.json"
    result = run("bench", *arguments, "--json", str(file))
    raw = msgspec.json.decode(file.read_bytes())
    assert set(raw) == set(Report.__struct_fields__)
    report = msgspec.convert(raw, Report)
    assert report.machine.cores >= 1 and report.machine.torch and report.machine.cpu
    assert report.machine.cpu in result.stdout
    return report, result.stdout


def check_runs(report: Report, *, together: bool = True) -> None:
    """:param together: all streams begin at once, so that two steps of all of them follow each other."""
    for run in report.runs:
        assert len(run.tok_s_rounds) == report.rounds
        assert min(run.tok_s_rounds) <= run.tok_s <= max(run.tok_s_rounds)
        assert run.tok_s > 0
        for spread in (run.ttft, run.itl):
            assert spread is not None and 0 < spread.p50 <= spread.p99 <= spread.max
        assert set(run.phases_ms) == {"launch", "wait", "commit", "sample"}
        assert all(time >= 0 for time in run.phases_ms.values())
        assert run.steps >= report.workload.output_tokens
        assert not together or (run.step_ms is not None and run.device_ms is not None)
        assert 0 <= run.idle_share < 1
        assert run.zombies == 0  # the end was foreseen
