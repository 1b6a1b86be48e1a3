"""``aphoton prebuild``: what it asks for, and what it leaves. What it compiles is tested where it is compiled."""

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.running import Run

from aphoton import __version__
from aphoton.errors import AphotonError

command: Any = importlib.import_module("aphoton.cli.prebuild")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Everything but the compiling; what would have been compiled for."""
    given: dict[str, Any] = {}

    def triton(source: Any, config: Any, dtype: torch.dtype, out: Path, capability: Any, libcuda: Path) -> int:
        given.update(source=source, config=config, dtype=dtype, capability=capability)
        (out / "triton").mkdir()
        (out / "triton/kernel").write_bytes(bytes(3 << 20))
        return 24

    def flashinfer(source: Any, dtype: torch.dtype, out: Path, arch: str, libcuda: Path, scratch: str) -> int:
        given.update(arch=arch)
        return 1

    monkeypatch.setattr(command, "_check_tools", lambda: None)
    monkeypatch.setattr(command, "_libcuda", lambda folder: folder)
    monkeypatch.setattr(command, "_triton", triton)
    monkeypatch.setattr(command, "_flashinfer", flashinfer)
    return given


def test_says_what_it_made_and_how_to_use_it(run: Run, tmp_path: Path, built: dict[str, Any]) -> None:
    out = tmp_path / "image" / "kernels"
    options = ("--max-rows", "8", "--max-model-len", "512", "--dtype", "float16")
    done = run("prebuild", "--model", "random:tiny", "--arch", "9.0a", "--out", str(out), *options)
    assert done.stdout == f"export APHOTON_KERNELS={out}\n"
    assert "Triton: 24 modules, 0 s" in done.stderr
    assert "FlashInfer: 1 modules" in done.stderr
    assert "3.0 MiB, for compute capability 9.0a" in done.stderr
    assert built["capability"] == (9, 0)
    assert built["arch"] == "9.0a"
    assert (built["config"].max_rows, built["source"].max_model_len, built["dtype"]) == (8, 512, torch.float16)
    record = json.loads((out / "versions.json").read_text())
    assert record["arch"] == "9.0a"
    assert record["aphoton"] == __version__
    made_for = {"model": "random:tiny", "max_rows": 8, "page_size": 16, "max_model_len": 512, "dtype": "float16"}
    assert record["made_for"] == made_for


def test_what_fails_is_not_sealed(
    run: Run, tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> int:
        raise AphotonError("FlashInfer's kernels do not compile: see above")

    monkeypatch.setattr(command, "_flashinfer", fail)
    done = run("prebuild", "--model", "random:tiny", "--out", str(tmp_path), code=1)
    assert done.stderr.splitlines()[-1] == "error: FlashInfer's kernels do not compile: see above"
    assert "made_for" not in json.loads((tmp_path / "versions.json").read_text())


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--arch", "sm_90"], 2, "error: arch: must be a compute capability like 9.0a or 8.0, not 'sm_90'"),
        (["--dtype", "float32"], 2, "error: dtype: the kernels for cuda have no float32"),
        (["--max-model-len", "100000"], 2, "error: max_model_len: must be at most the model's 2048"),
        (["--model", "random:huge"], 1, "error: random:huge: no such random model"),
    ],
)
def test_errors_in_one_line(run: Run, tmp_path: Path, options: list[str], code: int, message: str) -> None:
    done = run("prebuild", "--model", "random:tiny", "--out", str(tmp_path / "out"), *options, code=code)
    assert done.stderr.splitlines()[-1].startswith(message)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_said_at_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    monkeypatch.setenv("CC", "gcc")
    done = run("prebuild", "--model", "random:tiny", "--out", str(tmp_path / "out"), code=1)
    assert done.stderr == (
        "error: this needs nvcc (of the CUDA toolkit; CUDA_HOME says where it is), ninja (pip install ninja), "
        "a C and C++ compiler (gcc, g++)\n"
    )
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    done = run("prebuild", "--model", "random:tiny", code=1)
    assert done.stderr.startswith("error: this needs flashinfer (pip install 'aphoton[cuda]'), triton (")


def test_something_to_link_with(tmp_path: Path) -> None:
    if command.find_cc() is None:
        pytest.skip("there is no C compiler")
    folder = command._libcuda(tmp_path)
    library = tmp_path / "a.so"
    options = ["-shared", "-fPIC", "-Wl,--as-needed", "-o", str(library), "-x", "c", "-", f"-L{folder}", "-lcuda"]
    source = b"const char *cuGetErrorString(void); const char *why(void) { return cuGetErrorString(); }"
    subprocess.run([str(command.find_cc()), *options], input=source, check=True)
    assert b"libcuda.so.1" in library.read_bytes()
