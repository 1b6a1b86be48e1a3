"""Commands run for real: in this process, or in a terminal of their own."""

import pytest
from cli.running import Run
from onethread import one_thread as one_thread
from typer.testing import CliRunner, Result

from aphoton.cli.app import app


@pytest.fixture
def run() -> Run:
    """``run("generate", "random:tiny", "Hi")``, and an exit code to expect other than 0."""

    def invoke(*arguments: str, code: int = 0, input: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(app, arguments, input=input)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke
