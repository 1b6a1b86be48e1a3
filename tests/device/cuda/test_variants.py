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


def test_found_again(tmp_path: Path) -> None:
    made, found = launched(str(tmp_path / "built"))
    assert made > 10
    assert not found
    place = (tmp_path / "built").rename(tmp_path / "shipped")
    before = sorted(place.rglob("*"))
    own = tmp_path / "own"
    assert launched(APHOTON_KERNELS=str(place), TRITON_CACHE_DIR=str(own)) == (0, made)
    assert sorted(place.rglob("*")) == before
    assert not own.exists()
