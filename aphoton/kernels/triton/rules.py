"""`adjust`: what rows' rules leave of their logits: bias, penalties, masks and bans."""

import triton
import triton.language as tl
from torch import Tensor

from aphoton.kernels.triton import argmax
from aphoton.kernels.triton.sampler_state import STATE_WORDS, SamplerState
from aphoton.sampling.row import MAX_BIAS

__all__ = ["adjust"]


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
    """What rules leave of some rows' logits, in ``state.adjusted``, for `sample.sample_ruled`.

    Either in one call, or in two if processors are to change ``state.adjusted`` in between.

    :param logits: [B, V]; they are not changed.
    :param places: [m or more] int32 batch entries.
    :param rows, counts: [m or more] int32 of these entries; see `sample.sample`. Nothing is done for row 0, padding.
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
    if row == 0:
        return
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
