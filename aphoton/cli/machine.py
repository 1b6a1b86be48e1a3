"""`Machine`: where figures were made."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

import aphoton
from aphoton import EngineConfig

__all__ = ["Machine"]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What figures depend on.

    :ivar cores: that this process may use.
    :ivar memory_gb: of the machine; None where it does not say.
    :ivar load: tasks that wanted a core in the last minute, before the measurement: others' work disturbs it.
    """

    cpu: str
    cores: int
    memory_gb: float | None
    load: float | None
    system: str
    python: str
    torch: str
    aphoton: str
    gpu: str | None = None

    @classmethod
    def here(cls, device: str = "auto") -> "Machine":
        """:param device: on which steps run: it says which of several GPUs that is."""
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_gb=_memory_gb(),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            system=platform.platform(),
            python=platform.python_version(),
            torch=version("torch"),
            aphoton=aphoton.__version__,
            gpu=_gpu(EngineConfig(device=device).gpu or 0),
        )

    def __str__(self) -> str:
        memory = "" if self.memory_gb is None else f", {self.memory_gb:.0f} GB"
        load = "" if self.load is None else f", load {self.load:.1f}"
        gpu = "" if self.gpu is None else f"{self.gpu}; "
        return (
            f"{gpu}{self.cpu}, {self.cores} cores{memory}{load}; {self.system}; "
            f"Python {self.python}, torch {self.torch}, aphoton {self.aphoton}"
        )


def _gpu(index: int) -> str | None:
    """The name of the GPU that steps would run on."""
    import torch

    return torch.cuda.get_device_name(index) if index < torch.cuda.device_count() else None


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
