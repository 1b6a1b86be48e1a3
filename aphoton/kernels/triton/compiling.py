"""`compile_only`: Triton's launches compile, for a GPU that need not be there, and run nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import build
from triton.runtime.jit import JITFunction

from aphoton.errors import InvalidRequest
from aphoton.kernels.triton import decode_attention
from aphoton.kernels.triton.cache import FOLDER, MODULES

__all__ = ["Compiled", "assume_processors", "compile_only"]

SHARED_MEMORY = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
"""Bytes that a program may have, by compute capability (CUDA C++ Programming Guide, "Technical Specifications")."""


class Compiled:
    """What launches have compiled so far.

    :ivar made: kernels that were not there yet.
    :ivar found: kernels that were.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self.found: list[str] = []

    def __call__(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self.found if cache_hit else self.made).append(str(src.name))


class Nothing(ModuleType):
    """A compiled module that cannot be loaded here: it would need the driver. Whatever it is asked is None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def compile_only(folder: Path | None, capability: tuple[int, int], libcuda: Path) -> Compiled:
    """From now on, in this process, each launch compiles its kernel and does no more.

    The launches are those of a GPU: the same types, constants and alignments (tensors may be on the CPU, or on
    ``meta``, where all are aligned), so that Triton finds the kernels again when it is to run them.

    :param folder: of the kernels. None: where Triton looks for them.
    :param libcuda: a folder with something that the linker takes for ``libcuda.so.1``.
    :raises InvalidRequest: for a GPU that is not known.
    """
    if capability not in SHARED_MEMORY:
        known = ", ".join(f"{major}.{minor}" for major, minor in SHARED_MEMORY)
        raise InvalidRequest("arch", f"must be of compute capability {known}, not {capability[0]}.{capability[1]}")
    decode_attention.SHARED_MEMORY = SHARED_MEMORY[capability]
    if folder is not None:
        knobs.cache.dir = str(folder / FOLDER)
        knobs.compilation.store_binary_only = True
    knobs.nvidia.libcuda_path = str(libcuda)
    # Triton compiles C too, and loads it at once.
    build._load_module_from_path = lambda name, path: _keep(name, path, folder)
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    triton.runtime.driver.set_active(
        SimpleNamespace(
            utils=CudaUtils(),
            launcher_cls=CudaLauncher,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        )
    )
    compiled = Compiled()
    knobs.compilation.listener = compiled
    run, launchers = JITFunction.run, set()
    platform_key = build.platform_key
    platforms = [platform_key()] if folder is None else _platforms(platform_key())

    def compile_(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in launchers:
            launchers.add(kernel.hash)
            for platform in platforms:
                build.platform_key = lambda platform=platform: platform
                CudaLauncher(kernel.src, kernel.metadata)  # before 3.7 each signature has one, in C
            build.platform_key = platform_key
        return kernel

    JITFunction.run = compile_
    return compiled


def assume_processors(count: int) -> None:
    """Have what is made from now on think that the GPU has so many multiprocessors."""
    decode_attention.PROCESSORS = count


def _platforms(key: str) -> list[str]:
    """What Triton's keys of host modules may say of a machine like this one, of which they say ``key``.

    The last part is what `platform.architecture` finds with the program ``file``: nothing where that is not installed,
    and images that run a model have less than those that build them.
    """
    machine = key.rpartition(",")[0]
    return [f"{machine},{linkage}" for linkage in ("ELF", "")]


def _keep(name: str, path: str, folder: Path | None) -> ModuleType:
    """Copy what has a key that tells of this machine to where it is found under any."""
    if folder is not None and name == "cuda_utils":
        target = folder / MODULES
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return Nothing(name)
