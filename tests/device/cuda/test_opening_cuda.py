"""What is refused before a model is loaded onto a GPU, on GPUs that are made up."""

from typing import Any

import msgspec
import pytest
import torch

from aphoton import EngineConfig, InvalidRequest
from aphoton.device.cuda import opening
from aphoton.device.source import Source
from aphoton.models.random import SHAPES

GPU = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(opening, "missing_packages", list)


def source(**shape: Any) -> Source:
    config = msgspec.structs.replace(SHAPES["135m"], **shape)
    return Source(config=config, weights=iter(()), name="a model", max_model_len=100, eos_token_ids=())


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"kernels": "native"}, "kernels"), ({"kernels": "fused", "dtype": "float32"}, "dtype")],
)
def test_settings(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        opening.check_cuda(EngineConfig(device="cuda", **settings))
    assert refused.value.field == field


def test_which_gpu() -> None:
    for device in ("cuda", "cuda:0", "cuda:1"):
        opening.check_cuda(EngineConfig(device=device))
    with pytest.raises(InvalidRequest, match=r"device: there is no cuda:2: the last of the GPUs here is cuda:1"):
        opening.check_cuda(EngineConfig(device="cuda:2"))


@pytest.mark.parametrize("settings", [{}, {"dtype": "float16"}, {"kernels": "fused"}])
def test_missing_packages(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    opening.check_cuda(EngineConfig(device="cuda", **settings))
    monkeypatch.setattr(opening, "missing_packages", lambda: ["flashinfer"])
    with pytest.raises(InvalidRequest, match=r"pip install 'aphoton\[cuda\]'"):
        opening.check_cuda(EngineConfig(device="cuda", **settings))
    for without in ({"kernels": "torch"}, {"dtype": "float32"}):
        opening.check_cuda(EngineConfig(device="cuda", **{**settings, "kernels": "auto", **without}))


def test_models_that_the_fused_kernels_run() -> None:
    for settings in ({}, {"kernels": "fused"}, {"dtype": "float16"}):
        assert opening._fused(source(), EngineConfig(**settings), GPU)
    for settings in ({"kernels": "torch"}, {"dtype": "float32"}):
        assert not opening._fused(source(), EngineConfig(**settings), GPU)


@pytest.mark.parametrize("shape", [{"head_dim": 80}, {"head_dim": 16}, {"num_heads": 130, "num_kv_heads": 2}])
def test_models_that_they_cannot_run(shape: dict[str, Any]) -> None:
    assert not opening._fused(source(**shape), EngineConfig(), GPU)
    with pytest.raises(InvalidRequest, match="cannot run a model: it has") as refused:
        opening._fused(source(**shape), EngineConfig(kernels="fused"), GPU)
    assert refused.value.field == "kernels"


def test_old_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not opening._fused(source(), EngineConfig(), GPU)
    with pytest.raises(InvalidRequest, match=r"capability 7\.5, and they need 8\.0"):
        opening._fused(source(), EngineConfig(kernels="fused"), GPU)
