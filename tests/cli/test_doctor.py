"""``aphoton doctor``."""

from pathlib import Path

import pytest
import torch
from cli.running import Run

from aphoton.cli import doctor


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_machine_without_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: None)
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("doctor").stdout
    assert "no NVIDIA GPU" in shown and torch.__version__ in shown and "aphoton runs on the CPU here" in shown


def test_a_folder_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("APHOTON_KERNELS", str(tmp_path / "none"))
    monkeypatch.setenv("COLUMNS", "300")
    assert "no such folder" in run("doctor", code=1).stdout


@pytest.mark.parametrize(
    ("answer", "found", "remedy"),
    [
        ((0, "580.1\n", ""), "580.1", ""),
        (
            (9, "", "cannot talk to the driver"),
            "nvidia-smi fails: cannot talk to the driver",
            "install NVIDIA's driver",
        ),
    ],
)
def test_drivers(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str], found: str, remedy: str, tmp_path: Path
) -> None:
    code, output, errors = answer
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{output}'\necho '{errors}' >&2\nexit {code}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._driver() == (found, remedy)
