"""`Sampler`: from logits to tokens, on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aphoton.sampling.penalties import Penalties
from aphoton.sampling.processor import LogitsProcessor, process, processor_error
from aphoton.sampling.row import RowSampling

__all__ = ["Sampled", "Sampler"]

BLOCK = 256
"""Weights in a block of `_invert`."""

CANDIDATES = 1024
"""Likeliest tokens that are looked at first where a row filters; the whole vocabulary only when these do not reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a step sampled; all on the CPU.

    :ivar tokens: [n] int64.
    :ivar finite: [n] bool; false where the largest logit, as given, is NaN or infinite: the token means nothing then.
    :ivar barred: [n] bool; true where it is only what the row asks for that has left no finite one.
    :ivar logprobs: [n] float32 of the chosen tokens, before temperature and filters; None when no row asks.
    :ivar top_ids, top_logprobs: [n, k] the likeliest, best first, k the most that a row asks for; None when none does.
    :ivar errors: what processors raised, by index.
    """

    tokens: Tensor
    finite: Tensor
    barred: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    errors: dict[int, Exception] = field(default_factory=dict)


class _Rules:
    """What a row asks for that changes its logits, from the first token on.

    :ivar allowed: [k] int64, the only ids; None: all.
    """

    def __init__(self, sampling: RowSampling) -> None:
        self._bias = torch.tensor([token for token, _ in sampling.bias], dtype=torch.int64)
        self._values = torch.tensor([value for _, value in sampling.bias], dtype=torch.float32)
        self.allowed = None if sampling.allowed is None else torch.tensor(sampling.allowed, dtype=torch.int64)
        self.penalties = Penalties(sampling) if sampling.penalized else None

    def apply(self, logits: Tensor) -> None:
        """Bias and penalties, to [V] logits in place."""
        logits[self._bias] += self._values
        if self.penalties is not None:
            self.penalties.apply(logits)


class Sampler:
    """The sampler state of all rows, and the draw.

    Bias, penalties, processors, masks and bans; then temperature, top-k, top-p, min-p in this order, as Hugging Face's
    processors; then one draw by inverting the cumulative distribution. A row's random number depends on its seed and on
    how many tokens it has sampled, and on nothing else: not on its neighbours, not on the step, not on the pipeline.
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
        self._ruled = np.zeros(size, np.bool_)
        self._rules: dict[int, _Rules] = {}

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
        self._ruled[row] = sampling.ruled
        if sampling.ruled:
            self._rules[row] = _Rules(sampling)
        else:
            self._rules.pop(row, None)

    def sample(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        counts: NDArray[np.int32],
        *,
        masked: NDArray[np.int32] | None = None,
        masks: NDArray[np.uint32] | None = None,
        processors: Sequence[tuple[int, LogitsProcessor, list[int]]] = (),
    ) -> Sampled:
        """Choose a token for each row.

        :param logits: [n, V] float32; what changes them does so in place.
        :param rows: [n] whose they are. Row 0 is nobody's, and greedy: it may be here more than once.
        :param counts: [n] tokens sampled for the row before: the counter of its random stream.
        :param masked, masks: [m] indices, and [m, mask_words] which tokens these may have; see `Late`.
        :param processors: (index, processor, the row's output so far).
        """
        wanted = int(self._logprobs[rows].max())
        normalizer = logits.logsumexp(dim=1) if wanted >= 0 else None
        top = logits.topk(min(wanted, logits.shape[1]), dim=1) if wanted > 0 else None
        ruled = np.flatnonzero(self._ruled[rows]).tolist()
        early = np.flatnonzero(counts < self._min_tokens[rows]).tolist()
        masked = np.zeros(0, np.int32) if masked is None else masked
        changed = sorted({*ruled, *early, *masked.tolist(), *(index for index, _, _ in processors)})
        sound = [bool(logits[index].max().isfinite()) for index in changed]
        raw = logits.clone() if normalizer is not None and changed else logits
        for index in ruled:
            self._rules[rows[index]].apply(logits[index])
        errors = _process(logits, processors)
        if masks is not None and len(masked):
            _mask(logits, masked, masks)
        has_mask = set(masked.tolist())
        for index in ruled:
            allowed = self._rules[rows[index]].allowed
            if allowed is not None and index not in has_mask:
                values = logits[index, allowed]
                logits[index] = -torch.inf
                logits[index, allowed] = values
        for index in early:
            logits[index, list(self._banned[rows[index]])] = -torch.inf
        best, tokens = logits.max(dim=1)
        left = best.isfinite()
        finite = left.clone()
        finite[changed] = torch.tensor(sound, dtype=torch.bool)
        barred = finite & ~left
        drawn = np.flatnonzero(self._temperature[rows] > 0)
        if len(drawn) == len(rows):
            tokens = self._draw(logits, rows, counts)
        elif len(drawn):
            tokens[torch.from_numpy(drawn)] = self._draw(logits[torch.from_numpy(drawn)], rows[drawn], counts[drawn])
        for index in ruled:
            penalties = self._rules[rows[index]].penalties
            if penalties is not None:
                penalties.add(int(tokens[index]))
        if normalizer is None:
            return Sampled(
                tokens=tokens,
                finite=finite,
                barred=barred,
                logprobs=None,
                top_ids=None,
                top_logprobs=None,
                errors=errors,
            )
        return Sampled(
            tokens=tokens,
            finite=finite,
            barred=barred,
            logprobs=raw.gather(1, tokens[:, None]).squeeze(1) - normalizer,
            top_ids=None if top is None else top.indices,
            top_logprobs=None if top is None else top.values - normalizer[:, None],
            errors=errors,
        )

    def _draw(self, logits: Tensor, rows: NDArray[np.int32], counts: NDArray[np.int32]) -> Tensor:
        """[n] one token each, from rows with a temperature."""
        vocab = logits.shape[1]
        uniform = torch.from_numpy(uniforms(self._seed[rows], counts))
        temperature = torch.from_numpy(self._temperature[rows])
        # The largest becomes 0 first, so that no temperature, however low, makes it infinite.
        below = logits - logits.max(dim=1, keepdim=True).values
        probabilities = below.div_(temperature[:, None]).nan_to_num_(nan=-torch.inf).softmax(dim=1)
        # A filter leaves what is likely enough: a threshold, so that the draw needs no order.
        top_k = np.where(self._top_k[rows] == 0, vocab, np.minimum(self._top_k[rows], vocab))
        top_p, min_p = self._top_p[rows], self._min_p[rows]
        threshold = torch.from_numpy(min_p) * probabilities.amax(dim=1)
        ranked = np.flatnonzero((top_k < vocab) | (top_p < 1))
        if len(ranked):
            some = torch.from_numpy(ranked)
            chosen = probabilities if len(ranked) == len(rows) else probabilities[some]
            least = _least(chosen, torch.from_numpy(top_k[ranked]), torch.from_numpy(top_p[ranked]))
            threshold[some] = torch.maximum(threshold[some], least)
        if len(ranked) or min_p.any():
            probabilities = torch.where(probabilities >= threshold[:, None], probabilities, 0.0)
        return _invert(probabilities, uniform)


def _process(logits: Tensor, processors: Sequence[tuple[int, LogitsProcessor, list[int]]]) -> dict[int, Exception]:
    """Let processors change their rows of [n, V] logits. What they raise is theirs alone."""
    errors: dict[int, Exception] = {}
    for index, processor, output in processors:
        try:
            process(processor, output, logits[index])
        except BaseException as error:  # of this thread nobody else cancels or interrupts anything
            errors[index] = processor_error(error)
    return errors


def _mask(logits: Tensor, masked: NDArray[np.int32], masks: NDArray[np.uint32]) -> None:
    """What the masks do not allow becomes -inf in these rows of [n, V] logits."""
    bits = np.unpackbits(np.ascontiguousarray(masks, "<u4").view(np.uint8), axis=1, bitorder="little")
    kept = torch.from_numpy(bits[:, : logits.shape[1]]).bool()
    rows = torch.from_numpy(masked.astype(np.int64))
    logits[rows] = torch.where(kept, logits[rows], -torch.inf)


def _least(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[n] the least probability of [n, V] that top-k, and top-p of what it leaves, keep."""
    vocab = probabilities.shape[1]
    look = min(CANDIDATES, int(top_k.max()))
    values = probabilities.topk(look, dim=1).values
    # Enough where top-p ends among them. It is of what top-k leaves, so a top-k beyond them needs them all.
    short = (top_k > look) & ((top_k < vocab) | (values.sum(dim=1) < top_p))
    if not short.any():
        return _least_of(values, top_k, top_p)
    least = torch.empty(len(probabilities))
    least[~short] = _least_of(values[~short], top_k[~short], top_p[~short])
    ranked = probabilities[short].sort(dim=1, descending=True).values
    least[short] = _least_of(ranked, top_k[short], top_p[short])
    return least


def _least_of(values: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`_least`, of [n, m] values that stand best first."""
    place = torch.arange(values.shape[1])
    values = torch.where(place < top_k[:, None], values, 0.0)
    running = values.cumsum(dim=1)
    # The last running sum, not `sum`: how many columns there are is the neighbours' doing, and must not change a bit.
    mass = torch.where(top_k <= values.shape[1], running[:, -1], 1.0)
    before = running - values
    kept = (place == 0) | (values > 0) & ((top_p >= 1)[:, None] | (before < (top_p * mass)[:, None]))
    return torch.where(kept, values, 1.0).amin(dim=1)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """[n] the place at which the running sum of [n, m] weights passes ``uniform`` times their sum.

    In two levels, blocks of `BLOCK` weights and then places in a block, so that only one block's sums are run up. The
    target stays below the sum, so that a draw at the very end cannot land on a weight of 0 behind the last one.
    """
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)
    blocks = padded.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    total = blocks[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # The bounds are for a row whose weights are NaN: its token means nothing, but it must be one.
    block = torch.searchsorted(blocks, target, right=True).clamp(max=blocks.shape[1] - 1)
    inside = padded.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).double().cumsum(dim=1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    left = torch.minimum(target - before, torch.nextafter(inside[:, -1:], torch.zeros_like(total)))
    place = block * BLOCK + torch.searchsorted(inside, left, right=True)
    return place.squeeze(1).clamp(max=weights.shape[1] - 1)


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
