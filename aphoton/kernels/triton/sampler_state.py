"""`SamplerState`: what rows ask of the sampler, on the device."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from aphoton.kernels.triton import argmax
from aphoton.sampling.masker import mask_words
from aphoton.sampling.row import MAX_BIAS, RowSampling

__all__ = ["STATE_WORDS", "SamplerState"]

WORDS = 13
"""Of a row's state, before its banned tokens."""
STATE_WORDS = tl.constexpr(WORDS)
"""The same, for kernels."""
PENALIZED, ALLOWED = 1, 2
"""Flags of a row's state. The kernels have the numbers."""
LARGEST = 2**31 - 1


class SamplerState:
    """What rows ask of the sampler, by engine row, on the device. Row 0 is padding, and greedy.

    Memory is taken at once, mostly 8 bytes for each row and token of the vocabulary.

    :ivar data: [max_rows + 1, 13 + max_banned] int32: seed (low word, high word), temperature, top_k, top_p, min_p,
        min_tokens, number of banned tokens, number of bias entries, repetition, presence and frequency penalty, flags,
        and the banned tokens, padded with -1. Those that are not integers are the bits of float32.
    :ivar rules: [max_rows + 1, 2 * MAX_BIAS + 2 * mask_words] int32, which mean something where ``data`` says so: ids
        of the bias, ascending; its values, bits of float32; the mask of the allowed tokens; that of the prompt's.
    :ivar seen: [max_rows + 1, V] int32, of penalized rows: how often each token has been sampled.
    :ivar adjusted: [max_rows, V] float32, logits after the rules, of the step that is being sampled.
    :ivar best: [max_rows, blocks, 2] int32, of the same step: see `argmax_scratch`.
    :ivar mask_words: of V: bit t % 32 of word t // 32 is token t's.
    :ivar none: [max_rows] int32, -1: no row has a mask.
    """

    def __init__(self, max_rows: int, max_banned: int, vocab: int, device: torch.device | str) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.max_banned = max_banned
        self.vocab = vocab
        self.mask_words = mask_words(vocab)
        self.data: Tensor = ints(max_rows + 1, WORDS + max_banned)
        self.rules: Tensor = ints(max_rows + 1, 2 * MAX_BIAS + 2 * self.mask_words)
        self.seen: Tensor = ints(max_rows + 1, vocab)
        self.adjusted: Tensor = torch.zeros(max_rows, vocab, dtype=torch.float32, device=device)
        self.best: Tensor = argmax.argmax_scratch(max_rows, vocab, device)
        self.none: Tensor = ints(max_rows) - 1

    def records(self, admitted: Sequence[RowSampling]) -> NDArray[np.int32]:
        """[k, 13 + max_banned] the rows' parts of ``data``, on the host.

        :raises ValueError: when a row bans or biases more tokens than there is room for.
        """
        records = np.full((len(admitted), WORDS + self.max_banned), -1, np.int32)
        records[:, :2] = np.array([s.seed for s in admitted], "<u8").view("<i4").reshape(-1, 2)
        floats = np.array([(s.temperature, s.top_p, s.min_p) for s in admitted], np.float32)
        records[:, [2, 4, 5]] = floats.view(np.int32)
        integers = [
            (min(s.top_k, LARGEST), min(s.min_tokens, LARGEST), len(s.banned), len(s.bias), _flags(s)) for s in admitted
        ]
        records[:, [3, 6, 7, 8, 12]] = integers
        floats = np.array(
            [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in admitted], np.float32
        )
        records[:, 9:12] = floats.view(np.int32)
        for record, sampling in zip(records, admitted, strict=True):
            if len(sampling.banned) > self.max_banned:
                raise ValueError(f"{len(sampling.banned)} banned tokens are more than {self.max_banned}")
            if len(sampling.bias) > MAX_BIAS:
                raise ValueError(f"{len(sampling.bias)} bias entries are more than {MAX_BIAS}")
            record[WORDS : WORDS + len(sampling.banned)] = sampling.banned
        return records

    def admit(self, admitted: Sequence[RowSampling]) -> None:
        """Takes the state of rows that begin, on the current stream."""
        rows = torch.tensor([sampling.row for sampling in admitted], device=self.data.device)
        self.data[rows] = torch.from_numpy(self.records(admitted)).to(self.data.device)
        self.admit_rules(admitted)

    def admit_rules(self, admitted: Sequence[RowSampling]) -> None:
        """The part of `admit` beside ``data``: of rows that are ruled, as much is copied as they ask for."""
        ruled = [(place, values) for s in admitted if s.ruled for place, values in self._rules_of(s)]
        if not ruled:
            return
        ends = np.cumsum([values.size for _, values in ruled]).tolist()
        # Torch keeps its memory until the device has read it.
        pinned = torch.empty(ends[-1], dtype=torch.int32, pin_memory=self.data.is_cuda)
        host = pinned.numpy()
        for (place, values), end in zip(ruled, ends, strict=True):
            host[end - values.size : end] = values
            place.copy_(pinned[end - values.size : end], non_blocking=True)

    def _rules_of(self, sampling: RowSampling) -> Iterator[tuple[Tensor, NDArray[np.int32]]]:
        """Places on the device, and what is to be there."""
        row, words = sampling.row, self.mask_words
        if sampling.bias:
            ids, values = zip(*sorted(sampling.bias), strict=True)
            yield self.rules[row, : len(ids)], np.array(ids, np.int32)
            yield self.rules[row, MAX_BIAS : MAX_BIAS + len(ids)], np.array(values, np.float32).view(np.int32)
        masks = self.rules[row, 2 * MAX_BIAS :].view(2, words)
        if sampling.allowed is not None:
            yield masks[0], self._mask(np.array(sampling.allowed, np.int64))
        if sampling.penalized:
            yield masks[1], self._mask(sampling.prompt)
            # What the row before has left is overwritten, not added to. Its last step, whose tokens nobody wanted any
            # more, may have counted them, but that has been enqueued before this.
            if sampling.output:
                counts = np.bincount(np.array(sampling.output, np.int64), minlength=self.vocab)
                yield self.seen[row], counts.astype(np.int32)
            else:
                self.seen[row].zero_()

    def _mask(self, ids: NDArray[np.integer]) -> NDArray[np.int32]:
        bits = np.zeros(32 * self.mask_words, np.bool_)
        bits[ids] = True
        return np.packbits(bits, bitorder="little").view("<i4")


def _flags(sampling: RowSampling) -> int:
    return PENALIZED * sampling.penalized | ALLOWED * (sampling.allowed is not None)
