"""`open_cpu`: a model on the CPU."""

import torch

from aphoton.config import EngineConfig
from aphoton.device.cpu import CpuDevice, Model
from aphoton.device.source import Source
from aphoton.errors import InvalidRequest, ModelError
from aphoton.kernels import NativeUnavailable, native_available
from aphoton.kernels.native import NativeDecoder
from aphoton.memory import machine_memory
from aphoton.models import Decoder

__all__ = ["open_cpu"]


def open_cpu(source: Source, config: EngineConfig) -> CpuDevice:
    """Load ``source`` for the native kernels, or for torch.

    :raises ModelError: when its weights cannot be read, or do not fit in memory.
    :raises InvalidRequest: when a setting does not go with the model or with this machine.
    """
    native = _native(config)
    dtype = _dtype(config, native)
    # Zeroed pages of the system's own: what no sequence has used yet takes no memory.
    pages = source.pages(config, dtype, machine_memory() // 4)
    try:
        kv = source.kv_cache(config, dtype, pages)
    except (MemoryError, ValueError, RuntimeError) as error:
        field = "kv_memory" if config.kv_memory is not None else "kv_pages"
        raise InvalidRequest(field, "so much KV cache does not fit in this machine's memory") from error
    try:
        runner = _load(source, config, dtype, native)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):  # as torch says it
            raise
        raise ModelError(f"{source.name}: its weights do not fit in this machine's memory: {error}") from error
    limits = source.limits(pages, dtype, "torch" if isinstance(runner, Decoder) else "native")
    return CpuDevice(runner, kv, limits, max_rows=config.max_rows)


def _native(config: EngineConfig) -> bool:
    """Whether to run the compiled kernels.

    :raises InvalidRequest: when they are asked for by name and cannot be had.
    """
    if config.kernels == "fused":
        raise InvalidRequest("kernels", "the fused kernels run on a GPU: on the CPU choose auto, native or torch")
    if config.kernels == "torch" or (config.kernels == "auto" and config.dtype == "float16"):
        return False
    reason = "they have no float16" if config.dtype == "float16" else native_available()
    if reason is not None and config.kernels == "native":
        raise InvalidRequest("kernels", f"the native kernels cannot run here: {reason}")
    return reason is None


def _load(source: Source, config: EngineConfig, dtype: torch.dtype, native: bool) -> Model:
    decoder = Decoder.open(source.config, source.weights, dtype=dtype, source=source.name)
    compiled = _compiled(decoder, config, source.max_model_len) if native else None
    if compiled is not None:
        return compiled
    decoder.read()
    return decoder


def _compiled(decoder: Decoder, config: EngineConfig, max_model_len: int) -> NativeDecoder | None:
    """The native decoder, to which ``decoder`` hands its weights over; None where it cannot serve it."""
    try:
        return NativeDecoder(decoder, positions=max_model_len)
    except NativeUnavailable as error:
        if config.kernels == "native":
            raise InvalidRequest("kernels", f"the native kernels cannot run this model: {error}") from error
        return None


def _dtype(config: EngineConfig, native: bool) -> torch.dtype:
    """``auto`` is what is fastest: half the bytes to read, where the kernels read bfloat16; torch's own CPU code is
    fastest in float32."""
    if config.dtype == "auto":
        return torch.bfloat16 if native else torch.float32
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
