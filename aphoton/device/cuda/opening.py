"""`open_cuda`: a model on a GPU."""

import importlib.util
import re
from typing import TYPE_CHECKING

import torch

from aphoton.config import EngineConfig
from aphoton.device.base import Device
from aphoton.device.cuda.streams import ALLOCATOR
from aphoton.device.source import Source
from aphoton.errors import InvalidRequest
from aphoton.kernels.limits import MOST_GROUP
from aphoton.kernels.prebuilt import use_prebuilt
from aphoton.memory import trim_memory
from aphoton.models import Decoder, Progress
from aphoton.tracebacks import clear_traceback

if TYPE_CHECKING:  # it brings FlashInfer
    from aphoton.attention.flashinfer import PrefillPlanner

__all__ = ["check_cuda", "cuda_dtype", "missing_packages", "open_cuda"]

HEAD_DIMS = (64, 128, 256)
"""Components of a head that both FlashInfer's prefill and our decode kernel take."""
CAPABILITY = (8, 0)
"""Of the oldest GPUs with bfloat16 in their matrix units."""
LOGITS = 16
"""Bytes by row and token of the vocabulary that log-probabilities take: float32, several times."""
SAMPLER = 9
"""Bytes by row and token of the vocabulary that the sampler keeps: counts, float32 logits, two bits of masks."""
PAGES = 36
"""Bytes by row and page of a row: its entry in the table, and four numbers that either slot may send."""
SHARE = 0.9
"""Of the memory that is free once the weights are there: what the KV cache may take of it. The rest is the graphs'."""


def check_cuda(config: EngineConfig) -> None:
    """:raises InvalidRequest: when this machine cannot run what is configured, saying what is missing."""
    if not torch.cuda.is_available():
        raise InvalidRequest(
            "device",
            f"cuda needs an NVIDIA GPU with its driver, and a CUDA build of torch (this is {torch.__version__})",
        )
    if (gpu := config.gpu or 0) >= (count := torch.cuda.device_count()):
        raise InvalidRequest("device", f"there is no cuda:{gpu}: the last of the GPUs here is cuda:{count - 1}")
    if config.kernels == "native":
        raise InvalidRequest("kernels", "native kernels run on the CPU: on cuda choose auto, fused or torch")
    if config.kernels == "torch" or (config.kernels == "auto" and config.dtype == "float32"):
        return
    if config.dtype == "float32":
        raise InvalidRequest("dtype", "the fused kernels have no float32: choose bfloat16, or kernels='torch'")
    if missing := missing_packages():
        raise InvalidRequest(
            "device",
            f"cuda needs {' and '.join(missing)}: pip install 'aphoton[cuda]', or choose kernels='torch', "
            "which is slower",
        )


def _fused(source: Source, config: EngineConfig, device: torch.device) -> bool:
    """Whether to run the fused kernels.

    :raises InvalidRequest: when they are asked for by name and cannot run the model.
    """
    if config.kernels == "torch" or config.dtype == "float32":
        return False
    shape, capability = source.config, torch.cuda.get_device_capability(device)
    reason = None
    if shape.head_dim not in HEAD_DIMS:
        reason = f"it has heads of {shape.head_dim} components, and they take {', '.join(map(str, HEAD_DIMS))}"
    elif shape.num_heads // shape.num_kv_heads > MOST_GROUP:
        reason = f"it has {shape.num_heads} query heads for {shape.num_kv_heads} KV heads"
    elif capability < CAPABILITY:
        reason = "this GPU is of compute capability {}.{}, and they need {}.{}".format(*capability, *CAPABILITY)
    if reason is not None and config.kernels == "fused":
        raise InvalidRequest("kernels", f"the fused kernels cannot run {source.name}: {reason}")
    return reason is None


def missing_packages() -> list[str]:
    """Of those that the fused kernels need, the ones that are not installed."""
    return [name for name in ("flashinfer", "triton") if importlib.util.find_spec(name) is None]


def cuda_dtype(config: EngineConfig) -> torch.dtype:
    """Of weights and cache."""
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def open_cuda(source: Source, config: EngineConfig, progress: Progress | None) -> Device:
    """Load ``source`` onto a GPU, and capture its graphs.

    :raises ModelError: when its weights cannot be read.
    :raises InvalidRequest: when a setting does not go with the model, or something does not fit in the GPU's memory.
    """
    device = torch.device("cuda", config.gpu or 0)
    try:
        with torch.cuda.device(device):  # kernels are compiled and launched for the current one
            return _open(source, config, progress, device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        asked = re.search(r"Tried to allocate [\d.]+ \w+", str(error))
        clear_traceback(error)
        with ALLOCATOR:
            torch.cuda.empty_cache()
        raise InvalidRequest(
            "kv_memory",
            f"{source.name} does not fit on {torch.cuda.get_device_name(device)}: "
            f"{asked[0].lower() if asked else 'out of memory'}, {free >> 20} of {total >> 20} MiB are free. "
            "Lower kv_memory or kv_pages, max_model_len, max_rows or max_step_tokens",
        ) from error


def _open(source: Source, config: EngineConfig, progress: Progress | None, device: torch.device) -> Device:
    fused = _fused(source, config, device)
    use_prebuilt(device)  # the sampler's are for any decoder
    # These need triton, which a machine without a GPU need not have.
    from aphoton.device.cuda.device import CudaDevice
    from aphoton.models.fused import FusedDecoder

    shape = source.config
    dtype = cuda_dtype(config)
    decoder = Decoder.load(shape, source.weights, dtype=dtype, device=device, source=source.name)
    trim_memory()
    step_tokens = min(config.longest_step, config.max_rows * source.max_model_len)
    reserve = _working_memory(shape.intermediate_size + shape.hidden_size, step_tokens, dtype) + (1 << 30)
    reserve += config.max_rows * shape.vocab_size * (LOGITS + SAMPLER)
    longest = -(-source.max_model_len // config.page_size)
    reserve += config.max_rows * longest * PAGES
    with ALLOCATOR:
        torch.cuda.empty_cache()  # what an engine before left with torch
    free = torch.cuda.mem_get_info(device)[0]
    pages = source.pages(config, dtype, max(0, int((free - reserve) * SHARE)))
    if config.kv_pages is None and config.kv_memory is None and pages < longest:
        raise InvalidRequest(
            "max_model_len",
            f"one sequence of {source.max_model_len} tokens needs {longest} pages of KV cache, and behind the weights "
            f"and a step of so many tokens (about {reserve >> 20} MiB) there is memory for {pages}: {free >> 20} MiB "
            "are free. Lower it",
        )
    kv = source.kv_cache(config, dtype, pages, device)
    return CudaDevice(
        FusedDecoder(decoder, kv, positions=source.max_model_len, max_rows=config.max_rows) if fused else decoder,
        kv,
        source.limits(pages, dtype, "fused" if fused else "torch"),
        max_rows=config.max_rows,
        step_tokens=step_tokens,
        planners=_planners(source, config, dtype, device) if fused else None,
        device=device,
        progress=progress or (lambda what, done, total: None),
    )


def _planners(
    source: Source, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> "tuple[PrefillPlanner, PrefillPlanner]":
    from aphoton.attention.flashinfer import PrefillPlanner

    shape = source.config

    def planner() -> PrefillPlanner:
        return PrefillPlanner(
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=config.page_size,
            dtype=dtype,
            device=device,
            windows=[shape.window(layer) for layer in range(shape.num_layers)],
        )

    return planner(), planner()


def _working_memory(width: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of activations of a step, about: what a layer's widest matrices leave, several times over."""
    return 4 * width * tokens * dtype.itemsize
