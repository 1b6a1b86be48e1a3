"""The memory of this machine and of this process."""

import ctypes
import math
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["machine_memory", "system_zeros", "trim_memory"]


def machine_memory() -> int:
    """Bytes of memory in this machine, or that this container may use; a guess where neither says."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = 8 << 30
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return memory


def trim_memory() -> None:
    """Give the system what the C library keeps of memory that is free. Only glibc's has to be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def system_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.zeros` on the CPU, in pages of the system's own.

    For what is large and lives as long as an engine. It goes back to the system with the tensor: what is given back to
    the C library may stay with the process, and the next model would come on top of it. And it takes no memory before
    it is written to, page by page: no huge pages, which a paged KV cache would touch from everywhere at once.
    """
    size = math.prod(shape) * dtype.itemsize
    if sys.platform == "win32" or not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes") from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
