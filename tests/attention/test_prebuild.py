"""FlashInfer's modules ahead of time, with something in place of FlashInfer, which takes minutes to compile one."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from aphoton.attention.prebuild import build_prefill
from aphoton.kernels import prebuilt


class JitSpec:
    def __init__(self, name: str, workspace: Path) -> None:
        self.name = name
        self.jit_library_path = workspace / f"{name}.so"

    def build(self, verbose: bool) -> None:
        if self.name.endswith("broken"):
            raise RuntimeError("nvcc fatal")
        self.jit_library_path.write_text(f"{self.name} for {os.environ['FLASHINFER_CUDA_ARCH_LIST']}")

    def build_and_load(self) -> Any:
        raise AssertionError("there is no GPU to load it on")


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """FlashInfer, as far as it is used; its ``calls`` are what modules were asked for."""
    fake: Any = ModuleType("flashinfer")
    fake.prefill, fake.jit = ModuleType("flashinfer.prefill"), ModuleType("flashinfer.jit")
    fake.jit.core, fake.jit.env = ModuleType("flashinfer.jit.core"), ModuleType("flashinfer.jit.env")
    fake.jit.core.JitSpec = JitSpec
    fake.jit.env.FLASHINFER_AOT_DIR = Path("/package")
    fake.utils = ModuleType("flashinfer.utils")
    fake.utils.device_support_pdl = lambda device: False
    fake.calls = []

    def get_batch_prefill_module(*args: Any) -> SimpleNamespace:
        fake.calls.append(args)
        module = JitSpec(f"prefill_{args[5]}_{args[8]}", tmp_path).build_and_load()
        return SimpleNamespace(plan=module.plan, ragged_run=module.ragged_run, paged_run=module.paged_run)

    fake.prefill.get_batch_prefill_module = get_batch_prefill_module
    fake.BatchPrefillWithPagedKVCacheWrapper = lambda workspace, layout, backend: SimpleNamespace()
    for module in (fake, fake.prefill, fake.utils, fake.jit, fake.jit.core, fake.jit.env):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(JitSpec, "build_and_load", JitSpec.build_and_load)
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "LIBRARY_PATH", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.setenv(name, "before")
    yield fake
    sys.modules.pop("aphoton.attention.flashinfer", None)


def build(folder: Path, windows: list[int | None], head_dim: int = 64) -> list[str]:
    return build_prefill(
        folder, dtype=torch.bfloat16, head_dim=head_dim, windows=windows, arch="9.0a", libcuda=Path("/stub")
    )


def test_what_the_layers_need_is_built(flashinfer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert build(folder, [None, 4096, None, 512]) == ["prefill_64_False", "prefill_64_True"]
    bf16, ints = torch.bfloat16, torch.int32
    assert flashinfer.calls == [
        ("fa2", bf16, bf16, bf16, ints, 64, 64, 0, sliding, False, False) for sliding in (False, True)
    ]
    for name in ("prefill_64_False", "prefill_64_True"):
        assert (folder / "flashinfer" / name / f"{name}.so").read_text() == f"{name} for 9.0a"
    assert os.environ["LIBRARY_PATH"] == f"/stub{os.pathsep}before"
    assert "FLASHINFER_DISABLE_JIT" not in os.environ
    assert build(tmp_path / "full", [None]) == ["prefill_64_False"]


def test_planners_look_there_first(flashinfer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.modules.pop("aphoton.attention.flashinfer", None)
    room: Any = importlib.import_module("aphoton.attention.flashinfer")
    monkeypatch.setattr(room, "WORKSPACE", 16)

    def planner() -> None:
        room.PrefillPlanner(
            heads=4,
            kv_heads=2,
            head_dim=64,
            page_size=16,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            windows=[None],
        )

    def looks_in() -> Path:
        place = flashinfer.jit.env.FLASHINFER_AOT_DIR
        assert isinstance(place, Path)
        return place

    planner()
    assert looks_in() == Path("/package")
    monkeypatch.setattr(prebuilt, "_used", [tmp_path])
    planner()
    assert looks_in() == tmp_path / "flashinfer"
