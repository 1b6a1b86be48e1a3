"""``aphoton serve-bench``."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from aphoton import InvalidRequest
from aphoton_serve.bench import serve_bench

app = typer.Typer()
app.command()(serve_bench)
QUICK = ["--output-tokens", "8", "--device", "cpu", "--dtype", "float32"]


@pytest.mark.filterwarnings("ignore")
def test_figures() -> None:
    run = CliRunner().invoke(app, ["--ways", "engine,http", "--concurrency", "1,2", "--rounds", "1", "--json", *QUICK])
    assert run.exit_code == 0, run.output
    figures = json.loads(run.stdout)
    assert [(one["way"], one["streams"]) for one in figures] == [
        ("engine alone", 1),
        ("engine alone", 2),
        ("HTTP", 1),
        ("HTTP", 2),
    ]
    assert all(one["tok_s"] > 0 and one["ttft"] > 0 and one["events"] >= 1 for one in figures)


@pytest.mark.parametrize(
    "bad",
    [
        ["--ways", "rays"],
        ["--concurrency", "0"],
        ["--ramp", "1,many"],
        ["--ramp", "1,2", "--concurrency", "8"],
        ["--ramp", "1,2", "--ways", "ray"],
        ["--ramp", "1,2", "--stage", "0"],
        ["--ramp", "1,2", "--max-replicas", "1"],
        ["--ramp", "1,2", "--plot", "/no/such/folder/ramp.png"],
        ["--plot", "ramp.png"],
        ["--stage", "5"],
        ["--max-replicas", "5"],
    ],
)
def test_what_cannot_be(bad: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, [*bad, *QUICK]).exception, InvalidRequest)


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_ramp(tmp_path: Path) -> None:
    """Real Ray: the load calls for a second replica, and none of its requests fails."""
    plot = tmp_path / "ramp.png"
    ramp = ["--ramp", "1,6,1", "--stage", "20", "--max-replicas", "2", "--plot", str(plot)]
    run = CliRunner().invoke(app, ["random:135m", *ramp, "--max-rows", "2", "--json", *QUICK])
    assert run.exit_code == 0, run.output
    course = json.loads(run.stdout)
    replicas = [look["running"] + look["starting"] for look in course["looks"]]  # a busy machine starts them slowly
    assert replicas[0] == 1 and max(replicas) == 2
    assert course["arrivals"] and all(one["error"] is None for one in course["arrivals"])
    assert plot.read_bytes().startswith(b"\x89PNG")
