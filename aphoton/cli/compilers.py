"""`find_nvcc`, `find_cc`: the compilers that FlashInfer and Triton would use."""

import os
import shutil

__all__ = ["find_cc", "find_nvcc"]


def find_nvcc() -> str | None:
    """Where FlashInfer will find it."""
    if named := os.environ.get("FLASHINFER_NVCC"):
        return shutil.which(named)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def find_cc() -> str | None:
    """The C compiler, as Triton chooses it."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
