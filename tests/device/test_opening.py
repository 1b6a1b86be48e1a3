"""`open_device`: which kernels, which type, how many pages."""

from typing import Any, Literal

import pytest
import torch

from aphoton import Engine, InvalidRequest
from aphoton.config import EngineConfig
from aphoton.device import opening, opening_cpu
from aphoton.device.base import Limits
from aphoton.kernels import NativeUnavailable, native_available
from aphoton.text import ByteTokenizer

needs_native = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))


def limits(**settings: Any) -> Limits:
    opened = opening.open_device("random:tiny", EngineConfig(**{"max_rows": 4, **settings}), None, lambda: None)
    assert isinstance(opened.tokenizer, ByteTokenizer) and opened.chat_template is None
    return opened.device.limits


@needs_native
@pytest.mark.parametrize(
    ("kernels", "dtype", "expected"),
    [
        ("auto", "auto", ("native", "bfloat16")),
        ("auto", "float32", ("native", "float32")),
        ("auto", "float16", ("torch", "float16")),
        ("native", "auto", ("native", "bfloat16")),
        ("native", "bfloat16", ("native", "bfloat16")),
        ("torch", "auto", ("torch", "float32")),
        ("torch", "bfloat16", ("torch", "bfloat16")),
    ],
)
def test_kernels_and_types(kernels: str, dtype: str, expected: tuple[str, str]) -> None:
    found = limits(kernels=kernels, dtype=dtype)
    assert (found.kernels, found.dtype) == expected


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_every_type_runs(
    kernels: Literal["torch", "auto"], dtype: Literal["float32", "bfloat16", "float16"]
) -> None:
    async with Engine("random:tiny", kernels=kernels, dtype=dtype, max_rows=2) as engine:
        assert engine.limits.dtype == dtype
        done = await engine.generate([1, 2, 3], max_tokens=5, temperature=1.0, logprobs=2)
        assert len(done.token_ids) == 5


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening_cpu, "native_available", lambda: "there is no compiler")
    found = limits()
    assert (found.kernels, found.dtype) == ("torch", "float32")
    with pytest.raises(InvalidRequest, match="there is no compiler") as caught:
        limits(kernels="native")
    assert caught.value.field == "kernels"


def test_a_model_that_the_native_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NativeUnavailable("its heads are odd")

    monkeypatch.setattr(opening_cpu, "native_available", lambda: None)
    monkeypatch.setattr(opening_cpu, "NativeDecoder", refuse)
    assert limits().kernels == "torch"
    with pytest.raises(InvalidRequest, match="its heads are odd") as caught:
        limits(kernels="native")
    assert caught.value.field == "kernels"


def test_fused_kernels_on_a_cpu() -> None:
    with pytest.raises(InvalidRequest, match="run on a GPU") as caught:
        limits(kernels="fused", device="cpu")
    assert caught.value.field == "kernels"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu() -> None:
    with pytest.raises(InvalidRequest, match="NVIDIA") as caught:
        limits(device="cuda")
    assert caught.value.field == "device"


PAGE_BYTES = 3 * 2 * 2 * 16 * 4
"""Of one token in the small model: layers, keys and values, KV heads, head_dim, float32."""


@pytest.mark.parametrize(
    ("settings", "pages", "longest"),
    [
        ({"kv_pages": 7}, 7, 2048),
        ({"kv_memory": 16 * PAGE_BYTES * 5 + 1}, 5, 2048),
        ({"kv_memory": 16 * PAGE_BYTES * 5 - 1}, 4, 2048),
        ({"kv_memory": 4 * PAGE_BYTES * 5, "page_size": 4}, 5, 2048),
        ({}, 4 * 64, 2048),  # 1,024 tokens a row
        ({"max_rows": 1}, 128, 2048),  # but at least one of the longest
        ({"max_model_len": 100}, 4 * 7, 100),
        ({"page_size": 32}, 4 * 32, 2048),
    ],
    ids=str,
)
def test_pages(settings: dict[str, Any], pages: int, longest: int) -> None:
    found = limits(dtype="float32", **settings)
    assert (found.pages, found.max_model_len) == (pages + 1, longest), "and the padding page"


def test_a_longer_model_length_than_the_models() -> None:
    with pytest.raises(InvalidRequest, match="2048") as caught:
        limits(max_model_len=2049)
    assert caught.value.field == "max_model_len"


class Unwanted(Exception):
    pass


def test_loading_ends_between_two_tensors_when_nobody_wants_the_model() -> None:
    tensors = 0

    def pause() -> None:
        nonlocal tensors
        tensors += 1
        if tensors == 5:
            raise Unwanted

    with pytest.raises(Unwanted):
        opening.open_device("random:tiny", EngineConfig(), None, pause)
    assert tensors == 5


def test_memory_for_less_than_a_page() -> None:
    with pytest.raises(InvalidRequest, match=str(16 * PAGE_BYTES)) as caught:
        limits(dtype="float32", kv_memory=16 * PAGE_BYTES - 1)
    assert caught.value.field == "kv_memory"
