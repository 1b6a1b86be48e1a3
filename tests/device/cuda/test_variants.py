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


def path(tmp_path: Path, has_file: bool) -> str:
    """A PATH with or without the program ``file``, by which Python knows what its own is: not every image has one."""
    program = tmp_path / f"file-{has_file}" / "file"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n" + ("echo ELF 64-bit LSB pie executable" if has_file else "exit 1") + "\n")
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(("here", "there"), [(True, True), (True, False), (False, True)])
def test_found_again(tmp_path: Path, here: bool, there: bool) -> None:
    made, found = launched(str(tmp_path / "built"), PATH=path(tmp_path, here))
    assert made > 10
    assert not found
    place = (tmp_path / "built").rename(tmp_path / "shipped")
    before = sorted(place.rglob("*"))
    own = tmp_path / "own"
    assert launched(APHOTON_KERNELS=str(place), TRITON_CACHE_DIR=str(own), PATH=path(tmp_path, there)) == (0, made)
    assert sorted(place.rglob("*")) == before
    assert not own.exists()


LAUNCHERS = """
import launched
from triton.backends.nvidia import driver
from triton.runtime import build

keys, own = set(), build.platform_key()
driver.CudaLauncher = lambda source, metadata: keys.add(build.platform_key())
launched.main()
assert build.platform_key() == own
print(own, *sorted(keys), sep="|")
"""


@pytest.mark.parametrize("has_file", [True, False])
def test_launchers_have_the_keys_of_either_machine(tmp_path: Path, has_file: bool) -> None:
    """Triton from 3.7 on compiles none in C, and the older ones do it here."""
    run = subprocess.run(
        [sys.executable, "-c", LAUNCHERS, str(tmp_path / "built")],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"PATH": path(tmp_path, has_file)},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    own, *keys = run.stdout.splitlines()[-1].split("|")
    assert own in keys and len(keys) == 2
    assert {key.rpartition(",")[2] for key in keys} == {"ELF", ""}
