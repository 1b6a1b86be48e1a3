"""``aphoton doctor``."""

import importlib.util
import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import typer
from rich.table import Table

from aphoton.cli.compilers import find_nvcc
from aphoton.cli.machine import Machine
from aphoton.cli.terminal import out

__all__ = ["doctor"]


class Finding(NamedTuple):
    """A line of the report.

    :ivar remedy: the command that brings what is missing; empty when nothing is.
    """

    what: str
    found: str
    remedy: str = ""


def doctor() -> None:
    """Say what this machine has, what aphoton would use of it, and what is missing: the exit code is 1 then."""
    findings = [*_python(), *_gpu(), *_cpu()]
    table = Table(show_header=False)
    for finding in findings:
        table.add_row(finding.what, finding.found, finding.remedy and f"[yellow]{finding.remedy}[/]")
    out.print(table)
    out.print(_verdict())
    if any(finding.remedy for finding in findings):
        raise typer.Exit(1)


def _python() -> list[Finding]:
    machine = Machine.here()
    return [
        Finding("machine", f"{machine.cpu}, {machine.cores} cores, {machine.system}"),
        Finding("Python", machine.python),
        Finding("aphoton", machine.aphoton),
    ]


def _gpu() -> list[Finding]:
    import torch

    from aphoton.kernels.prebuilt import VARIABLE  # brings torch, too

    driver = _driver()
    findings = [Finding("driver", *driver)]
    built = torch.version.cuda
    if built is None:
        # Without a driver a CUDA build would be of no use.
        remedy = "" if driver[0].startswith("none") else "pip install torch, from an index with CUDA builds"
        findings.append(Finding("torch", f"{torch.__version__}, built for the CPU only", remedy))
    else:
        findings.append(Finding("torch", f"{torch.__version__}, built for CUDA {built}"))
    if _has_gpu():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            findings.append(
                Finding(
                    f"GPU {index}",
                    f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
                    f"{properties.multi_processor_count} multiprocessors, {free >> 20} of {total >> 20} MiB free",
                )
            )
    for name, package, module in (("FlashInfer", "flashinfer-python", "flashinfer"), ("Triton", "triton", "triton")):
        found = _package(package, module)
        # Without a GPU neither is of use.
        remedy = "pip install 'aphoton[cuda]'" if found is None and _has_gpu() else ""
        findings.append(Finding(name, found or "not installed", remedy))
    if (folder := os.environ.get(VARIABLE)) is not None:
        findings.append(
            Finding("prebuilt kernels", folder, "" if Path(folder).is_dir() else f"{VARIABLE}: no such folder")
        )
    compiler = find_nvcc()
    nothing = (
        "" if folder is not None or not _has_gpu() else "install the CUDA toolkit, or bring `aphoton prebuild`'s folder"
    )
    findings.append(Finding("CUDA compiler", compiler or "none", "" if compiler else nothing))
    return findings


def _cpu() -> list[Finding]:
    from aphoton.kernels import native_available

    reason = native_available()
    if reason is None:
        return [Finding("CPU kernels", "compiled by this machine's C compiler")]
    return [Finding("CPU kernels", f"torch's own, several times slower: {reason}", "install a C compiler (cc)")]


def _verdict() -> str:
    from aphoton.device.cuda.opening import missing_packages
    from aphoton.kernels import native_available

    if _has_gpu():
        if not missing_packages():
            return "aphoton runs on this GPU by default: device='cuda', fused kernels, bfloat16."
        return "aphoton would run on this GPU, but for what is missing above; kernels='torch' works without, slower."
    if native_available() is None:
        return "aphoton runs on the CPU here: device='cpu', native kernels, bfloat16."
    return "aphoton runs on the CPU here: device='cpu', torch's kernels, float32."


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _driver() -> tuple[str, str]:
    """The driver's version, or what is missing and its remedy."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "none: no NVIDIA GPU can be used", ""
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer", "install NVIDIA's driver again, or restart the machine"
    lines = done.stdout.split()
    if done.returncode or not lines:
        return f"nvidia-smi fails: {(done.stderr or done.stdout).strip()[:80]}", "install NVIDIA's driver"
    return lines[0], ""


def _package(package: str, module: str) -> str | None:
    """Its version; None when it cannot be imported."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # put on the path by hand
        return "of unknown version"
