"""What the interpreter runs, the compiler must take: every kernel, compiled for a GPU that need not be there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_every_kernel_compiles() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = Path(__file__).parents[3] / "aphoton/kernels/triton"
    launched = {
        f"{path.stem}.{name}" for path in kernels.glob("*.py") for name in re.findall(r"(\w+)\[\(", path.read_text())
    }
    assert launched == {line.split(":")[0] for line in run.stdout.splitlines()}
