"""Commands run for real: in this process, or in a terminal of their own."""

from pathlib import Path

import pytest
import torch
from cli.running import Run
from talker import make_talker
from typer.testing import CliRunner, Result

from aphoton.cli.app import app


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small gain nothing from threads, and on a busy machine lose much."""
    torch.set_num_threads(1)


@pytest.fixture
def run() -> Run:
    """``run("generate", "random:tiny", "Hi")``, and an exit code to expect other than 0."""

    def invoke(*arguments: str, code: int = 0, input: str | None = None) -> Result:
        result = CliRunner().invoke(app, arguments, input=input)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a chat template: random weights, and no end token."""
    return make_talker(tmp_path_factory.mktemp("talker"))
