"""Kernels compiled ahead of time are found again: by another process, in another place, with no compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def launched(*arguments: str, **variables: str) -> tuple[int, int]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("launched.py")
    run = subprocess.run(
        [sys.executable, str(script), *arguments], env={**environment, **variables}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    made, found = run.stdout.split()
    return int(made), int(found)


@pytest.fixture
def with_file(tmp_path: Path) -> str:
    """A PATH with the program ``file``, by which Python knows what its own is: not every image has one."""
    program = tmp_path / "bin" / "file"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho ELF 64-bit LSB pie executable\n")
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def without_file(tmp_path: Path) -> str:
    """A PATH with nothing in it."""
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


@pytest.mark.parametrize("shipped_to", ["with_file", "without_file"])
def test_found_again(tmp_path: Path, with_file: str, shipped_to: str, request: pytest.FixtureRequest) -> None:
    made, found = launched(str(tmp_path / "built"), PATH=with_file)
    assert made > 10
    assert not found
    place = (tmp_path / "built").rename(tmp_path / "shipped")
    before = sorted(place.rglob("*"))
    own = tmp_path / "own"
    path = str(request.getfixturevalue(shipped_to))
    assert launched(APHOTON_KERNELS=str(place), TRITON_CACHE_DIR=str(own), PATH=path) == (0, made)
    assert sorted(place.rglob("*")) == before
    assert not own.exists()
