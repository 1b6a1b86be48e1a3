"""`CudaSampler`: from logits to tokens, on the device."""

import numpy as np
import torch
from torch import Tensor

from aphoton.device.base import Batch, Limits
from aphoton.device.cuda.slot import SlotBuffers
from aphoton.device.cuda.staging import Staging
from aphoton.kernels.triton.argmax import argmax, argmax_scratch
from aphoton.kernels.triton.sample import SamplerState, sample
from aphoton.sampling import RowSampling
from aphoton.sampling.params import MAX_LOGPROBS, MAX_STOPS

__all__ = ["CudaSampler"]


class CudaSampler:
    """The rows' sampler state, on the device for the draw and on the host for the choice of kernel.

    Most steps are greedy, and their sampler is part of the step's graph. A step in which a row draws, must not end
    yet, or wants log-probabilities is sampled again behind that, by a kernel that knows it all.
    """

    def __init__(self, *, max_rows: int, limits: Limits, device: torch.device) -> None:
        self._scratch = argmax_scratch(max_rows, limits.vocab_size, device)
        self._state = SamplerState(max_rows, MAX_STOPS + len(limits.eos_token_ids), device)
        self._draws = np.zeros(max_rows + 1, np.bool_)
        self._min_tokens = np.zeros(max_rows + 1, np.int32)
        self._logprobs = np.full(max_rows + 1, -1, np.int32)

    @property
    def words(self) -> int:
        """int32 values that are sent for a row that begins."""
        return 1 + self._state.data.shape[1]

    def stage(self, admitted: list[RowSampling], staging: Staging) -> tuple[Tensor, Tensor] | None:
        """Pack the state of rows that begin; what `admit` takes, once it has been sent."""
        if not admitted:
            return None
        rows = np.array([sampling.row for sampling in admitted], np.int32)
        self._draws[rows] = [sampling.temperature > 0 for sampling in admitted]
        self._min_tokens[rows] = [sampling.min_tokens for sampling in admitted]
        self._logprobs[rows] = [-1 if s.logprobs is None else s.logprobs for s in admitted]
        return staging.put(rows), staging.put(self._state.records(admitted))

    def admit(self, rows: Tensor, state: Tensor) -> None:
        """Enqueue the update of the rows' state."""
        self._state.data.index_copy_(0, rows.long(), state.view(len(rows), -1))

    def needed(self, batch: Batch) -> bool:
        """Whether the step takes more than `greedy`."""
        rows = batch.rows
        special = self._draws[rows] | (self._logprobs[rows] >= 0) | (batch.counts < self._min_tokens[rows])
        return bool(special.any())

    def greedy(self, logits: Tensor, rows: Tensor, last: Tensor, slot: SlotBuffers) -> None:
        """Enqueue the likeliest token of each row."""
        argmax(logits, rows, last, slot.tokens, slot.finite, self._scratch)

    def sample(
        self, logits: Tensor, batch: Batch, rows: Tensor, counts: Tensor, last: Tensor, slot: SlotBuffers
    ) -> None:
        """Enqueue the draw of each row, and the log-probabilities that rows ask for."""
        sample(logits, rows, counts, self._state, last, slot.tokens, slot.finite)
        wanted = int(self._logprobs[batch.rows].max())
        if wanted < 0:
            return
        slot.extra = _logprobs(logits, slot.tokens, wanted)

    def warm_up(self, logits: Tensor) -> None:
        """Enqueue what is most that a step may ask for, of the padding row, so that it takes no memory later."""
        rows = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        tokens, finite = torch.zeros_like(rows), torch.zeros_like(rows)
        sample(logits, rows, rows, self._state, torch.zeros_like(rows), tokens, finite)
        _logprobs(logits, tokens, MAX_LOGPROBS)


def _logprobs(logits: Tensor, tokens: Tensor, wanted: int) -> tuple[Tensor, ...]:
    """Log-probabilities of ``tokens``; if any are ``wanted``, also ids and log-probabilities of the likeliest."""
    values = logits.float()
    normalizer = values.logsumexp(dim=1, keepdim=True)
    chosen = (values.gather(1, tokens.long()[:, None]) - normalizer).squeeze(1)
    if not wanted:
        return (chosen,)
    top = values.topk(min(wanted, values.shape[1]), dim=1)
    return chosen, top.indices.int(), top.values - normalizer
