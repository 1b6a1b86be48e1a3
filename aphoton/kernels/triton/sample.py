"""`sample`, `sample_ruled` and `SamplerState`: the whole sampler, with the rows' state on the device."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from aphoton.kernels.triton import argmax
from aphoton.sampling.row import MAX_BIAS, RowSampling

__all__ = ["SamplerState", "adjust", "sample", "sample_ruled"]

BLOCK = 4096
"""Logits that are looked at together."""
WORDS = 13
"""Of a row's state, before its banned tokens."""
PENALIZED, ALLOWED = 1, 2
"""Flags of a row's state. The kernels have the numbers."""
STATE_WORDS = tl.constexpr(WORDS)
LARGEST = 2**31 - 1
FARTHEST = tl.constexpr(0x42D00000)
"""The bits of 104.0: e to the minus that is 0 in float32, so that nothing farther below the largest logit counts."""


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
    :ivar mask_words: ceil(V / 32): bit t % 32 of word t // 32 is token t's.
    :ivar none: [max_rows] int32, -1: no row has a mask.
    """

    def __init__(self, max_rows: int, max_banned: int, vocab: int, device: torch.device | str) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.max_banned = max_banned
        self.vocab = vocab
        self.mask_words = -(-vocab // 32)
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


def sample(
    logits: Tensor, rows: Tensor, counts: Tensor, state: SamplerState, last: Tensor, tokens: Tensor, finite: Tensor
) -> None:
    """Chooses a token for each batch entry, as `aphoton.sampling.Sampler` does, without log-probabilities.

    A row's token depends on its own logits and state only.

    :param logits: [B, V]; they are not changed.
    :param rows: [B] int32 engine row of each batch entry.
    :param counts: [B] int32 tokens sampled for the row before: the counter of its random stream.
    :param last: [R] int32: the token is written to ``last[rows[b]]``.
    :param tokens: [B] int32
    :param finite: [B] int32: 1, or 0 where the largest logit is infinite or any is NaN (banned ones aside). The token
        means nothing then, but it is one of the vocabulary.
    """
    batch, vocab = logits.shape
    block = min(BLOCK, max(triton.next_power_of_2(vocab), 16))
    blocks = triton.cdiv(vocab, block)
    _sample[(batch,)](
        logits,
        rows,
        counts,
        state.data,
        last,
        tokens,
        finite,
        None,
        None,
        None,
        STATE=state.data.shape[1],
        VOCAB=vocab,
        BLOCK=block,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        PARTS=0,
        PARTS_PADDED=1,
        num_warps=min(max(block // 256, 1), 16),
    )


def adjust(
    logits: Tensor,
    places: Tensor,
    rows: Tensor,
    counts: Tensor,
    masked: Tensor | None,
    masks: Tensor | None,
    state: SamplerState,
    *,
    many: int,
    soft: bool = True,
    hard: bool = True,
) -> None:
    """What rules leave of some rows' logits, in ``state.adjusted``, for `sample_ruled`.

    Either in one call, or in two if processors are to change ``state.adjusted`` in between.

    :param logits: [B, V]; they are not changed.
    :param places: [m or more] int32 batch entries.
    :param rows, counts: [m or more] int32 of these entries; see `sample`.
    :param masked: [m or more] int32, which of the masks an entry has; -1: none. None: no entry has one.
    :param masks: [k, mask_words] int32, which tokens may come, in place of those that the row allows.
    :param many: m
    :param soft: bias and penalties, which read ``logits``.
    :param hard: masks and bans, and ``state.best``.
    """
    vocab = logits.shape[1]
    blocks = triton.cdiv(vocab, argmax.BLOCK)
    _adjust[(many, blocks)](
        logits,
        places,
        rows,
        counts,
        state.none if masked is None else masked,
        state.rules if masks is None else masks,
        state.data,
        state.rules,
        state.seen,
        state.adjusted,
        state.best,
        STATE=state.data.shape[1],
        RULES=state.rules.shape[1],
        MASK=state.mask_words,
        BIAS=MAX_BIAS,
        VOCAB=vocab,
        BLOCK=argmax.BLOCK,
        BLOCKS=blocks,
        SOFT=soft,
        HARD=hard,
        num_warps=4,
    )


def sample_ruled(
    places: Tensor,
    rows: Tensor,
    counts: Tensor,
    state: SamplerState,
    last: Tensor,
    tokens: Tensor,
    finite: Tensor,
    *,
    many: int,
) -> None:
    """Chooses a token for those batch entries whose logits are in ``state.adjusted``, and counts it.

    :param places, rows, counts, many: as given to `adjust`.
    :param last, tokens, finite: see `sample`; of ``tokens`` and ``finite``, those at ``places`` are written.
    """
    vocab = state.vocab
    block = min(BLOCK, max(triton.next_power_of_2(vocab), 16))
    blocks = triton.cdiv(vocab, block)
    parts = state.best.shape[1]
    _sample[(many,)](
        state.adjusted,
        rows,
        counts,
        state.data,
        last,
        tokens,
        finite,
        places,
        state.best,
        state.seen,
        STATE=state.data.shape[1],
        VOCAB=vocab,
        BLOCK=block,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        PARTS=parts,
        PARTS_PADDED=triton.next_power_of_2(parts),
        num_warps=min(max(block // 256, 1), 16),
    )


@triton.jit
def _adjust(
    logits,
    places,
    rows,
    counts,
    masked,
    masks,
    state,
    rules,
    seen,
    adjusted,
    best,
    STATE: tl.constexpr,
    RULES: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SOFT: tl.constexpr,
    HARD: tl.constexpr,
):
    i, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i).to(tl.int64)
    state += row * STATE
    rules += row * RULES
    adjusted += i.to(tl.int64) * VOCAB
    flags = tl.load(state + 12)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < VOCAB
    if SOFT:
        logits += tl.load(places + i).to(tl.int64) * VOCAB
        value = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        biased = tl.load(state + 8)
        if biased > 0:
            # The entries of this block: they are in the order of their ids.
            entry = tl.arange(0, BIAS)
            token = tl.load(rules + entry, mask=entry < biased, other=0x7FFFFFFF)
            begin = tl.sum((token < block * BLOCK).to(tl.int32), 0)
            end = tl.sum((token < (block + 1) * BLOCK).to(tl.int32), 0)
            for at in range(begin, end):
                bias = tl.load(rules + BIAS + at).to(tl.float32, bitcast=True)
                value = tl.where(column == tl.load(rules + at), value + bias, value)
        if (flags & 1) != 0:
            many = tl.load(seen + row * VOCAB + column, mask=inside, other=0)
            word = tl.load(rules + 2 * BIAS + MASK + column // 32, mask=inside, other=0)
            repetition = tl.load(state + 9).to(tl.float32, bitcast=True)
            presence = tl.load(state + 10).to(tl.float32, bitcast=True)
            frequency = tl.load(state + 11).to(tl.float32, bitcast=True)
            repeated = (many > 0) | (((word >> (column % 32)) & 1) != 0)
            less = tl.where(value > 0.0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
            value = tl.where(repeated, less, value)  # of no penalty, 1, the same
            value -= tl.where(many > 0, many.to(tl.float32) * frequency + presence, 0.0)
    else:
        value = tl.load(adjusted + column, mask=inside, other=float("-inf"))
    if HARD:
        mask = tl.load(masked + i)
        word = tl.full([BLOCK], -1, tl.int32)
        if mask >= 0:
            word = tl.load(masks + mask.to(tl.int64) * MASK + column // 32, mask=inside, other=0)
        else:
            if (flags & 2) != 0:
                word = tl.load(rules + 2 * BIAS + column // 32, mask=inside, other=0)
        value = tl.where(((word >> (column % 32)) & 1) != 0, value, float("-inf"))
        bans = tl.where(tl.load(counts + i) < tl.load(state + 6), tl.load(state + 7), 0)
        for at in range(bans):
            value = tl.where(column == tl.load(state + STATE_WORDS + at), float("-inf"), value)
        # As `argmax` leaves it: NaN where there is one.
        wrong = value != value
        finite = tl.where(wrong, float("-inf"), value)
        largest = tl.max(finite, 0)
        place = tl.min(tl.where(finite == largest, column, VOCAB), 0)
        largest = tl.where(tl.max(wrong.to(tl.int32), 0) > 0, float("nan"), largest)
        part = best + (i * BLOCKS + block) * 2
        tl.store(part, largest.to(tl.int32, bitcast=True))
        tl.store(part + 1, place)
        # Greedy rows need no more than that.
        if tl.load(state + 2).to(tl.float32, bitcast=True) > 0.0:
            tl.store(adjusted + column, value, mask=inside)
    else:
        tl.store(adjusted + column, value, mask=inside)


@triton.jit
def _sample(
    logits,
    rows,
    counts,
    state,
    last,
    tokens,
    finite,
    places,
    best_of,
    seen,
    STATE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    b = tl.program_id(0)
    row = tl.load(rows + b)
    count = tl.load(counts + b)
    logits += b.to(tl.int64) * VOCAB
    state += row.to(tl.int64) * STATE
    temperature = tl.load(state + 2).to(tl.float32, bitcast=True)
    banned = state + STATE_WORDS
    offset = tl.arange(0, BLOCK)
    if PARTS > 0:
        # `_adjust` has looked at the blocks of these logits, and left nothing of what is banned.
        bans = 0
        part = tl.arange(0, PARTS_PADDED)
        inside = part < PARTS
        largest = tl.load(best_of + (b * PARTS + part) * 2, mask=inside, other=0).to(tl.float32, bitcast=True)
        place = tl.load(best_of + (b * PARTS + part) * 2 + 1, mask=inside, other=VOCAB)
        wrong = (inside & (largest != largest)).to(tl.int32)
        largest = tl.where(inside & (largest == largest), largest, float("-inf"))
        best = tl.max(largest, 0)
        token = tl.min(tl.where(largest == best, place, VOCAB), 0)
    else:
        bans = tl.where(count < tl.load(state + 6), tl.load(state + 7), 0)
        # The largest logit, and whether one is NaN: comparisons skip it.
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        place = tl.zeros([BLOCK], tl.int32) + offset
        wrong = tl.zeros([BLOCK], tl.int32)
        for i in range(BLOCKS):
            value = _read(logits, i * BLOCK + offset, banned, bans, VOCAB)
            wrong |= (value != value).to(tl.int32)
            larger = value > largest
            largest = tl.where(larger, value, largest)
            place = tl.where(larger, i * BLOCK + offset, place)
        best = tl.max(largest, 0)
        # Places behind the vocabulary are never the first: where all is -inf, that is 0.
        token = tl.min(tl.where(largest == best, place, VOCAB), 0)
    good = (tl.max(wrong, 0) == 0) & (tl.abs(best) < float("inf"))

    if good & (temperature > 0.0):
        limit = _limit(logits, state, banned, bans, best, temperature, VOCAB, BLOCK, BLOCKS)
        least = tl.load(state + 5).to(tl.float32, bitcast=True)
        # Distances from the largest logit are in temperatures, and weights are e to the minus distance.
        # The draw inverts the cumulative distribution: first among blocks, then in one.
        sums = tl.zeros([PADDED], tl.float64)
        for i in range(BLOCKS):
            far = tl.div_rn(best - _read(logits, i * BLOCK + offset, banned, bans, VOCAB), temperature)
            weight = _weights(far, limit, least)
            sums = tl.where(tl.arange(0, PADDED) == i, tl.sum(weight, 0), sums)
        ends = tl.cumsum(sums, 0)
        goal = _below(_uniform(state, count) * tl.max(ends, 0), tl.max(ends, 0))
        block = tl.min(tl.where((ends > goal) & (sums > 0.0), tl.arange(0, PADDED), BLOCKS - 1), 0)
        goal -= tl.sum(tl.where(tl.arange(0, PADDED) < block, sums, 0.0), 0)
        far = tl.div_rn(best - _read(logits, block * BLOCK + offset, banned, bans, VOCAB), temperature)
        weight = _weights(far, limit, least)
        ends = tl.cumsum(weight, 0)
        goal = _below(goal, tl.max(ends, 0))
        chosen = tl.min(tl.where((ends > goal) & (weight > 0.0), block * BLOCK + offset, VOCAB), 0)
        token = tl.where(chosen < VOCAB, chosen, token)

    if PARTS > 0:
        at = tl.load(places + b)
        if (tl.load(state + 12) & 1) != 0:
            times = seen + row.to(tl.int64) * VOCAB + token
            tl.store(times, tl.load(times) + 1)
    else:
        at = b
    tl.store(tokens + at, token)
    tl.store(finite + at, good.to(tl.int32))
    tl.store(last + row, token)


@triton.jit
def _read(logits, column, banned, bans, VOCAB: tl.constexpr):
    """[BLOCK] float32 logits, -inf where there is none or the token is banned."""
    value = tl.load(logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    for i in range(bans):
        value = tl.where(column == tl.load(banned + i), float("-inf"), value)
    return value


@triton.jit
def _weights(far, limit, least):
    """[BLOCK] float64 probabilities, as parts of the largest, of what the filters leave."""
    weight = tl.exp(-far)
    return tl.where((far.to(tl.int32, bitcast=True) <= limit) & (weight >= least), weight, 0.0).to(tl.float64)


@triton.jit
def _limit(
    logits, state, banned, bans, best, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The distance up to which top-k, and top-p of what it leaves, keep tokens: int32, the bits of a float32."""
    top_k = tl.load(state + 3)
    top_p = tl.load(state + 4).to(tl.float32, bitcast=True)
    limit = tl.full([], FARTHEST, tl.int32)
    if ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1.0):
        many, mass = _within(logits, banned, bans, best, temperature, limit, VOCAB, BLOCK, BLOCKS)
        if (top_k > 0) & (top_k < many):
            goal = top_k.to(tl.float64)
            limit = _search(logits, banned, bans, best, temperature, limit, goal, False, VOCAB, BLOCK, BLOCKS)
            # All that are as likely as the last of the k are kept, but of these top-p counts k in all.
            many, mass = _within(logits, banned, bans, best, temperature, limit - 1, VOCAB, BLOCK, BLOCKS)
            last = tl.exp(-limit.to(tl.float32, bitcast=True)).to(tl.float64)
            mass += (top_k - many).to(tl.float64) * last
        if top_p < 1.0:
            goal = mass * top_p.to(tl.float64)
            limit = _search(logits, banned, bans, best, temperature, limit, goal, True, VOCAB, BLOCK, BLOCKS)
    return limit


@triton.jit
def _within(
    logits, banned, bans, best, temperature, limit, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """How many tokens are within a distance, and the sum of their weights in float64."""
    offset = tl.arange(0, BLOCK)
    number = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for i in range(BLOCKS):
        far = tl.div_rn(best - _read(logits, i * BLOCK + offset, banned, bans, VOCAB), temperature)
        inside = far.to(tl.int32, bitcast=True) <= limit
        number += inside.to(tl.int32)
        sums += tl.where(inside, tl.exp(-far), 0.0)
    return tl.sum(number, 0), tl.sum(sums.to(tl.float64), 0)


@triton.jit
def _search(
    logits,
    banned,
    bans,
    best,
    temperature,
    high,
    goal,
    WEIGHTS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The least distance, at most ``high``, within which there are ``goal`` tokens, or (with WEIGHTS) weights that sum
    to ``goal``.

    Between a distance with too few and one with enough, which is always that of a token, three are tried at a time.
    Distances are the bits of float32, which are in the floats' order.
    """
    offset = tl.arange(0, BLOCK)
    low = high * 0 - 1
    while high - low > 1:
        # The first tries are 1/16 and 4, as most of the range of bits is of numbers that are nearly 0. The last is what
        # ends the search, at the latest when no other token is left between the two.
        wide = (low < 0) & (high > 0x40800000)
        third = (high - low) // 3
        at1 = tl.where(wide, 0x3D800000, low + third)
        at2 = tl.where(wide, 0x40800000, low + 2 * third)
        at3 = high - 1
        sums1 = tl.zeros([BLOCK], tl.float32)
        sums2 = tl.zeros([BLOCK], tl.float32)
        sums3 = tl.zeros([BLOCK], tl.float32)
        most1 = tl.zeros([BLOCK], tl.int32)
        most2 = tl.zeros([BLOCK], tl.int32)
        most3 = tl.zeros([BLOCK], tl.int32)
        for i in range(BLOCKS):
            far = tl.div_rn(best - _read(logits, i * BLOCK + offset, banned, bans, VOCAB), temperature)
            weight = tl.exp(-far) if WEIGHTS else 1.0
            bits = far.to(tl.int32, bitcast=True)
            sums1 += tl.where(bits <= at1, weight, 0.0)
            sums2 += tl.where(bits <= at2, weight, 0.0)
            sums3 += tl.where(bits <= at3, weight, 0.0)
            most1 = tl.where(bits <= at1, tl.maximum(most1, bits), most1)
            most2 = tl.where(bits <= at2, tl.maximum(most2, bits), most2)
            most3 = tl.where(bits <= at3, tl.maximum(most3, bits), most3)
        enough1 = tl.sum(sums1.to(tl.float64), 0) >= goal
        enough2 = tl.sum(sums2.to(tl.float64), 0) >= goal
        enough3 = tl.sum(sums3.to(tl.float64), 0) >= goal
        low = tl.where(enough1, low, tl.where(enough2, at1, tl.where(enough3, at2, at3)))
        high = tl.where(enough3, tl.max(most3, 0), high)
        high = tl.where(enough2, tl.max(most2, 0), high)
        high = tl.where(enough1, tl.max(most1, 0), high)
    return high


@triton.jit
def _below(value, bound):
    """``value``, but less than ``bound``, a positive float64: so that a draw at the very end cannot pass the last."""
    return tl.minimum(value, (bound.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True))


@triton.jit
def _uniform(state, count):
    """In [0, 1), float64: SplitMix64 of (seed, count), the numbers of `aphoton.sampling.sampler.uniforms`."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(state).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed |= tl.load(state + 1).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    number = _mix(_mix(seed + golden) + (count.to(tl.uint64) + 1) * golden)
    return (number >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return value ^ (value >> 31)
