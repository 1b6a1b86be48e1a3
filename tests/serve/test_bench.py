"""``aphoton serve-bench``, but for what needs Ray."""

import json

import pytest
import typer
from typer.testing import CliRunner

from aphoton import InvalidRequest
from aphoton_serve.bench import serve_bench

app = typer.Typer()
app.command()(serve_bench)
QUICK = ["--output-tokens", "8", "--rounds", "1", "--device", "cpu", "--dtype", "float32"]


@pytest.mark.filterwarnings("ignore")
def test_figures() -> None:
    run = CliRunner().invoke(app, ["--ways", "engine,http", "--concurrency", "1,2", "--json", *QUICK])
    assert run.exit_code == 0, run.output
    figures = json.loads(run.stdout)
    assert [(one["way"], one["streams"]) for one in figures] == [
        ("engine alone", 1),
        ("engine alone", 2),
        ("HTTP", 1),
        ("HTTP", 2),
    ]
    assert all(one["tok_s"] > 0 and one["ttft"] > 0 and one["events"] >= 1 for one in figures)


@pytest.mark.parametrize("bad", [["--ways", "rays"], ["--concurrency", "0"]])
def test_what_cannot_be(bad: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, [*bad, *QUICK]).exception, InvalidRequest)
