"""`find_nvcc`, `cuda_release`, `find_cc`: the compilers that FlashInfer and Triton would use."""

import os
import re
import shutil
import subprocess

__all__ = ["cuda_release", "find_cc", "find_nvcc"]


def find_nvcc() -> str | None:
    """Where FlashInfer will find it."""
    if named := os.environ.get("FLASHINFER_NVCC"):
        return shutil.which(named)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def cuda_release() -> str | None:
    """Of the toolkit that nvcc belongs to: ``13.0``. None where there is none, or it does not say."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else None


def find_cc() -> str | None:
    """The C compiler, as Triton chooses it."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
