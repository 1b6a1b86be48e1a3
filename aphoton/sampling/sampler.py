"""`Sampler`: from logits to tokens, where the logits are."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aphoton.sampling.row import RowSampling

__all__ = ["Sampled", "Sampler"]

CANDIDATES = 1024
"""Likeliest tokens that are looked at first where a row filters; the whole vocabulary only when these do not reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a step sampled; every tensor on the sampler's device.

    :ivar tokens: [n] int64.
    :ivar finite: [n] bool; false where the largest logit is NaN or infinite: the token means nothing then.
    :ivar logprobs: [n] float32 of the chosen tokens, before temperature and filters; None when no row asks.
    :ivar top_ids, top_logprobs: [n, k] the likeliest, best first, k the most that a row asks for; None when none does.
    """

    tokens: Tensor
    finite: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


class Sampler:
    """The sampler state of all rows, and the draw.

    Temperature, top-k, top-p, min-p in this order, as Hugging Face's processors, then one draw by inverting the
    cumulative distribution. A row's random number depends on its seed and on how many tokens it has sampled, and on
    nothing else: not on its neighbours, not on the step, not on the pipeline.
    """

    def __init__(self, *, max_rows: int) -> None:
        size = max_rows + 1
        self._seed = np.zeros(size, np.uint64)
        self._temperature = np.zeros(size, np.float32)
        self._top_k = np.zeros(size, np.int64)
        self._top_p = np.ones(size, np.float32)
        self._min_p = np.zeros(size, np.float32)
        self._min_tokens = np.zeros(size, np.int64)
        self._logprobs = np.full(size, -1, np.int64)
        self._banned: list[tuple[int, ...]] = [()] * size

    def admit(self, sampling: RowSampling) -> None:
        """Take the state of a row that begins."""
        row = sampling.row
        self._seed[row] = sampling.seed
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._min_tokens[row] = sampling.min_tokens
        self._logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._banned[row] = sampling.banned

    def sample(self, logits: Tensor, rows: NDArray[np.int32], counts: NDArray[np.int32]) -> Sampled:
        """Choose a token for each row.

        :param logits: [n, V] float32. Those of banned tokens are overwritten.
        :param rows: [n] whose they are.
        :param counts: [n] tokens sampled for the row before: the counter of its random stream.
        """
        wanted = int(self._logprobs[rows].max())
        normalizer = logits.logsumexp(dim=1) if wanted >= 0 else None
        top = logits.topk(min(wanted, logits.shape[1]), dim=1) if wanted > 0 else None
        raw = logits.clone() if normalizer is not None and (counts < self._min_tokens[rows]).any() else logits
        for index in np.flatnonzero(counts < self._min_tokens[rows]).tolist():
            logits[index, list(self._banned[rows[index]])] = -torch.inf
        best, tokens = logits.max(dim=1)
        drawn = np.flatnonzero(self._temperature[rows] > 0)
        if len(drawn):
            tokens[torch.from_numpy(drawn)] = self._draw(logits[torch.from_numpy(drawn)], rows[drawn], counts[drawn])
        if normalizer is None:
            return Sampled(tokens=tokens, finite=best.isfinite(), logprobs=None, top_ids=None, top_logprobs=None)
        return Sampled(
            tokens=tokens,
            finite=best.isfinite(),
            logprobs=raw.gather(1, tokens[:, None]).squeeze(1) - normalizer,
            top_ids=None if top is None else top.indices,
            top_logprobs=None if top is None else top.values - normalizer[:, None],
        )

    def _draw(self, logits: Tensor, rows: NDArray[np.int32], counts: NDArray[np.int32]) -> Tensor:
        """[n] one token each, from rows with a temperature."""
        uniform = torch.from_numpy(uniforms(self._seed[rows], counts))
        temperature = torch.from_numpy(self._temperature[rows])
        probabilities = (logits / temperature[:, None]).nan_to_num(nan=-torch.inf).softmax(dim=1)
        filtered = (self._top_k[rows] > 0) | (self._top_p[rows] < 1) | (self._min_p[rows] > 0)
        tokens = torch.empty(len(rows), dtype=torch.int64)
        for some, draw in ((~filtered, _draw_all), (filtered, self._draw_filtered)):
            index = torch.from_numpy(np.flatnonzero(some))
            if len(index):
                tokens[index] = draw(probabilities[index], uniform[index], rows[some])
        return tokens

    def _draw_filtered(self, probabilities: Tensor, uniform: Tensor, rows: NDArray[np.int32]) -> Tensor:
        top_k = torch.from_numpy(self._top_k[rows])
        top_p = torch.from_numpy(self._top_p[rows])
        min_p = torch.from_numpy(self._min_p[rows])
        vocab = probabilities.shape[1]
        top_k = torch.where(top_k == 0, vocab, top_k.clamp(max=vocab))
        look = min(CANDIDATES, vocab)
        kept, ids = probabilities.topk(look, dim=1)
        # Enough where the last one looked at is beyond one of the row's filters. Top-p is of what top-k has left, so
        # a top-k beyond the candidates needs them all.
        beyond = (kept.sum(dim=1) >= top_p) | (kept[:, -1] < min_p * kept[:, 0])
        short = (top_k > look) & ((top_k < vocab) | ~beyond)
        tokens = torch.empty(len(rows), dtype=torch.int64)
        for some, whole in ((~short, False), (short, True)):
            index = some.nonzero().squeeze(1)
            if not len(index):
                continue
            values, order = probabilities[index].sort(dim=1, descending=True) if whole else (kept[index], ids[index])
            values = _filter(values, top_k[index], top_p[index], min_p[index])
            place = _invert(values, uniform[index])
            tokens[index] = order.gather(1, place[:, None]).squeeze(1)
        return tokens


def _filter(values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[n, m] probabilities, best first, with what the filters drop set to 0. The best one always stays."""
    place = torch.arange(values.shape[1])
    values = torch.where(place < top_k[:, None], values, 0.0)
    mass = torch.where(top_k <= values.shape[1], values.sum(dim=1), 1.0)
    before = values.cumsum(dim=1) - values
    values = torch.where((top_p >= 1)[:, None] | (before < (top_p * mass)[:, None]), values, 0.0)
    return torch.where(values >= (min_p * values[:, 0])[:, None], values, 0.0)


def _invert(values: Tensor, uniform: Tensor) -> Tensor:
    """[n] the place at which the cumulative sum of [n, m] weights passes ``uniform`` times their sum."""
    cumulative = values.cumsum(dim=1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # A draw at the very end must not land on a weight of 0 behind the last one.
    last = values.shape[1] - 1 - (values.flip(1) > 0).to(torch.int8).argmax(dim=1)
    return torch.minimum(place, last)


def _draw_all(probabilities: Tensor, uniform: Tensor, rows: NDArray[np.int32]) -> Tensor:
    return _invert(probabilities, uniform)


def uniforms(seeds: NDArray[np.uint64], counts: NDArray[np.int32]) -> NDArray[np.float64]:
    """[n] numbers in [0, 1), 53 bits each: SplitMix64 of (seed, counter).

    Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014. The seed is mixed before the
    counter is added, so that neighbouring seeds have streams that do not overlap.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _mix(seeds + golden) + (counts.astype(np.uint64) + np.uint64(1)) * golden
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
