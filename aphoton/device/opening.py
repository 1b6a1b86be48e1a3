"""`open_device`: a checkpoint, loaded onto the device that the configuration names."""

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from aphoton.attention import KVCache
from aphoton.config import EngineConfig
from aphoton.device.base import Limits
from aphoton.device.cpu import CpuDevice, Model
from aphoton.errors import InvalidRequest, ModelError
from aphoton.kernels import NativeUnavailable, native_available
from aphoton.kernels.native import NativeDecoder
from aphoton.memory import machine_memory, trim_memory
from aphoton.models import Checkpoint, Decoder, ModelConfig, Progress, RandomCheckpoint, find_checkpoint
from aphoton.text import ByteTokenizer, ChatTemplate, Tokenizer

__all__ = ["open_device"]

DEFAULT_TOKENS_PER_ROW = 1024
"""KV cache per row when the configuration gives no size: most requests are shorter, and rows share the pages."""


class Opened(NamedTuple):
    """A device with a model on it, and the model's way with text."""

    device: CpuDevice
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def open_device(
    model: str | os.PathLike[str], config: EngineConfig, progress: Progress | None, pause: Callable[[], None]
) -> Opened:
    """Fetch and load ``model``.

    :param pause: called between two tensors; it raises when nobody wants the model any more.
    :raises ModelError: when the model cannot be found, read or run.
    :raises InvalidRequest: when a setting does not go with the model or with this machine.
    """
    if config.device == "cuda":
        raise InvalidRequest("device", "this version runs on cpu and sim, not on cuda yet")
    checkpoint = find_checkpoint(model, progress)
    shape = checkpoint.config
    native = _native(config)
    dtype = _dtype(config, native)
    max_model_len = config.max_model_len or shape.max_model_len
    if max_model_len > shape.max_model_len:
        raise InvalidRequest("max_model_len", f"must be at most the model's {shape.max_model_len}, not {max_model_len}")
    pages = _pages(config, shape, dtype, max_model_len)
    try:
        kv = KVCache(
            layers=shape.num_layers,
            pages=pages,
            page_size=config.page_size,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
        )
    except (MemoryError, ValueError, RuntimeError) as error:
        field = "kv_memory" if config.kv_memory is not None else "kv_pages"
        raise InvalidRequest(field, "so much KV cache does not fit in this machine's memory") from error
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        if not isinstance(checkpoint, RandomCheckpoint):
            raise ModelError(f"{model}: has no tokenizer, expected tokenizer.json or the GGUF file's own")
        tokenizer = ByteTokenizer(shape.vocab_size)
    decoder = Decoder.load(shape, _pausing(checkpoint.weights(), pause), dtype=dtype, source=str(model))
    template = _template(checkpoint, tokenizer)
    # The file and what reading it took go before the weights are packed, which takes more again.
    del checkpoint
    trim_memory()
    runner: Model = _compiled(decoder, config, max_model_len) if native else decoder
    limits = Limits(
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        pages=kv.data.shape[2],
        # Each may know an end that the other does not: a configuration's list, a vocabulary's end of turn.
        eos_token_ids=tuple(
            dict.fromkeys(i for i in (*shape.eos_token_ids, *tokenizer.eos_token_ids) if 0 <= i < shape.vocab_size)
        ),
        dtype=str(dtype).removeprefix("torch."),
        kernels="torch" if runner is decoder else "native",
    )
    device = CpuDevice(runner, kv, limits, max_rows=config.max_rows)
    del decoder
    trim_memory()
    return Opened(device, tokenizer, template)


def _pausing(weights: Iterator[tuple[str, Tensor]], pause: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    for weight in weights:
        pause()
        yield weight


def _native(config: EngineConfig) -> bool:
    """Whether to run the compiled kernels.

    :raises InvalidRequest: when they are asked for by name and cannot be had.
    """
    if config.kernels == "torch" or (config.kernels == "auto" and config.dtype == "float16"):
        return False
    reason = "they have no float16" if config.dtype == "float16" else native_available()
    if reason is not None and config.kernels == "native":
        raise InvalidRequest("kernels", f"the native kernels cannot run here: {reason}")
    return reason is None


def _compiled(decoder: Decoder, config: EngineConfig, max_model_len: int) -> Model:
    """The native decoder, which takes the weights of ``decoder`` over; ``decoder`` itself where it cannot serve it."""
    try:
        return NativeDecoder(decoder, positions=max_model_len)
    except NativeUnavailable as error:
        if config.kernels == "native":
            raise InvalidRequest("kernels", f"the native kernels cannot run this model: {error}") from error
        return decoder


def _dtype(config: EngineConfig, native: bool) -> torch.dtype:
    """``auto`` is what is fastest: half the bytes to read, where the kernels read bfloat16; torch's own CPU code is
    fastest in float32."""
    if config.dtype == "auto":
        return torch.bfloat16 if native else torch.float32
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _pages(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """Pages of the KV cache, the padding page included."""
    page = KVCache.page_bytes(
        layers=shape.num_layers,
        page_size=config.page_size,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
    )
    longest = -(-max_model_len // config.page_size)
    if config.kv_pages is not None:
        pages = config.kv_pages
    elif config.kv_memory is not None:
        pages = config.kv_memory // page
        if pages < 1:
            raise InvalidRequest("kv_memory", f"must hold at least one page of {page} bytes, not {config.kv_memory}")
    else:
        wanted = max(longest, config.max_rows * -(-min(max_model_len, DEFAULT_TOKENS_PER_ROW) // config.page_size))
        pages = max(1, min(wanted, machine_memory() // 4 // page))
    return pages + 1


def _template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    if checkpoint.chat_template is None:
        return None
    return ChatTemplate(checkpoint.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
