"""`build_prefill`: FlashInfer's attention, compiled ahead of time."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["FOLDER", "build_prefill"]

FOLDER = "flashinfer"
"""Of the prebuilt folder. In it FlashInfer's own order: each module in a folder of its name."""


def build_prefill(
    folder: Path, *, dtype: torch.dtype, head_dim: int, windows: Iterable[int | None], arch: str, libcuda: Path
) -> list[str]:
    """Compile what `PrefillPlanner` loads, which takes minutes. For a process that does nothing else.

    FlashInfer builds in its workspace (``FLASHINFER_WORKSPACE_BASE``), where what is up to date is not built again.

    :param libcuda: a folder with something that the linker takes for ``libcuda.so``.
    :returns: the names of the modules.
    :raises RuntimeError: when they do not compile, with what the compiler said.
    """
    # FlashInfer reads it when it is imported.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(libcuda), os.environ.get("LIBRARY_PATH")]))
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)
    import flashinfer.prefill
    from flashinfer.jit.core import JitSpec

    built: list[str] = []

    def build(spec: Any) -> SimpleNamespace:
        """In place of loading: what is compiled for another GPU, or without a driver, cannot be."""
        spec.build(verbose=False)
        target = folder / FOLDER / spec.name
        target.mkdir(parents=True, exist_ok=True)
        library = target / f"{spec.name}.so"
        # Somebody may be using the folder: another model's kernels may be the same.
        shutil.copy(spec.jit_library_path, library.with_suffix(".new"))
        library.with_suffix(".new").replace(library)
        built.append(spec.name)
        return SimpleNamespace(plan=None, ragged_run=None, paged_run=None)

    JitSpec.build_and_load = build
    for sliding in sorted({window is not None for window in windows}):
        # What `plan` asks for: types of queries, cache, output and page ids; no position encoding of its own, no cap.
        flashinfer.prefill.get_batch_prefill_module(
            "fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, sliding, False, False
        )
    return built
