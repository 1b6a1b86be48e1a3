"""`launch_variants`: every kernel that steps of a model launch, in each of its variants."""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from aphoton.config import EngineConfig
from aphoton.device.cuda.graphs import buckets
from aphoton.device.cuda.sampler import CudaSampler
from aphoton.device.cuda.slot import SlotBuffers
from aphoton.device.source import Source
from aphoton.kernels.triton.compiling import assume_processors
from aphoton.kernels.triton.decode_attention import MOST_SPLITS, PROCESSORS
from aphoton.kernels.triton.page_update import update_tables
from aphoton.models import Decoder
from aphoton.models.fused import FusedDecoder, MixedInput, RowState

if TYPE_CHECKING:
    from aphoton.attention.flashinfer import PrefillPlanner

__all__ = ["launch_variants"]


class NoPlanner:
    """In place of `PrefillPlanner`."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None, out: Tensor) -> None:
        pass


def launch_variants(source: Source, config: EngineConfig, dtype: torch.dtype) -> None:
    """Launch them as `CudaDevice` does, on tensors that hold nothing: for `compile_only`.

    Not only in the batches that graphs are captured for: the number of splits depends on the GPU's multiprocessors
    too, of which there are more and fewer in GPUs of one architecture, so that attention comes in every number of
    splits that there is.
    """
    decoder = Decoder(source.config, dtype=dtype, device="meta")
    kv = source.kv_cache(config, dtype, 1, "meta")
    columns = -(-source.max_model_len // config.page_size)
    rows = max(config.max_rows, 3)
    state = RowState(last=_ints(rows + 1), tables=_ints(rows + 1, columns))

    logits = torch.empty(rows, source.config.vocab_size, dtype=dtype, device="meta")

    def fused() -> FusedDecoder:
        return FusedDecoder(decoder, kv, positions=source.max_model_len, max_rows=rows)

    with torch.inference_mode():
        usual = fused()
        for size in buckets(config.max_rows):
            update_tables(state.tables, _ints(size, 3), size)
            usual.decode(_ints(size), _ints(size), state, logits[:size])
        step = MixedInput(tokens=_ints(5), positions=_ints(5), rows=_ints(5), ends=_ints(2))
        for _ in usual.mixed(step, state, cast("PrefillPlanner", NoPlanner())):
            pass
        for splits in (1 << power for power in range(MOST_SPLITS.bit_length())):
            assume_processors(splits * source.config.num_kv_heads)  # two programs each, for a batch of two
            fused().decode(_ints(2), _ints(2), state, logits[:2])
        # Three programs each, as on a small GPU, or a part of one, with as few as two rows.
        assume_processors(source.config.num_kv_heads)
        fused().decode(_ints(3), _ints(3), state, logits[:3])
        assume_processors(PROCESSORS)
        _sample(source, config, dtype)


def _sample(source: Source, config: EngineConfig, dtype: torch.dtype) -> None:
    """Either sampler. These tensors are real: their addresses are looked at."""
    device = torch.device("cpu")
    sampler = CudaSampler(max_rows=config.max_rows, limits=source.limits(1, dtype, "fused"), device=device)
    logits = torch.empty(1, source.config.vocab_size, dtype=dtype)
    sampler.warm_up(logits)
    slot = SlotBuffers(
        None, tokens=1, rows=config.max_rows, pages=1, sampling=sampler.words, mask=sampler.mask_words, device=device
    )
    slot.size = 1
    rows, last = torch.zeros(1, dtype=torch.int32), torch.zeros(config.max_rows + 1, dtype=torch.int32)
    sampler.greedy(logits, rows, last, slot)


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
