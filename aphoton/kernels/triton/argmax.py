"""`argmax`: greedy choice of each row's token, in two kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["argmax", "argmax_scratch"]

BLOCK = 2048
"""Logits that one program looks at."""


def argmax_scratch(max_batch: int, vocab: int, device: torch.device | str) -> Tensor:
    """[max_batch, blocks, 2] int32 for `argmax`: each block's maximum (the bits of a float32) and where it is."""
    return torch.zeros(max_batch, triton.cdiv(vocab, BLOCK), 2, dtype=torch.int32, device=device)


def argmax(logits: Tensor, rows: Tensor, last: Tensor, tokens: Tensor, finite: Tensor, scratch: Tensor) -> None:
    """Writes each batch entry's likeliest token; the lowest id where several are.

    :param logits: [B, V]
    :param rows: [B] int32 engine row of each batch entry.
    :param last: [R] int32: the token is written to ``last[rows[b]]``.
    :param tokens: [B] int32
    :param finite: [B] int32: 1, or 0 where the largest logit is infinite or any is NaN. The token means nothing then,
        but it is one of the vocabulary.
    :param scratch: of `argmax_scratch`.
    """
    batch, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    _partial[(batch, blocks)](logits, scratch, VOCAB=vocab, BLOCK=BLOCK, BLOCKS=blocks, num_warps=4)
    padded = triton.next_power_of_2(blocks)
    _final[(batch,)](scratch, rows, last, tokens, finite, BLOCKS=blocks, PADDED=padded, num_warps=1)


@triton.jit
def _partial(logits, scratch, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    b, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + b.to(tl.int64) * VOCAB + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    # Comparisons skip NaN, so it is looked for and then left out. Places behind the vocabulary are never the first.
    wrong = value != value
    value = tl.where(wrong, float("-inf"), value)
    best = tl.max(value, 0)
    place = tl.min(tl.where(value == best, column, VOCAB), 0)
    best = tl.where(tl.max(wrong.to(tl.int32), 0) > 0, float("nan"), best)
    at = (b * BLOCKS + block) * 2
    tl.store(scratch + at, best.to(tl.int32, bitcast=True))
    tl.store(scratch + at + 1, place)


@triton.jit
def _final(scratch, rows, last, tokens, finite, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    b = tl.program_id(0)
    block = tl.arange(0, PADDED)
    inside = block < BLOCKS
    at = (b * BLOCKS + block) * 2
    value = tl.load(scratch + at, mask=inside, other=0).to(tl.float32, bitcast=True)
    place = tl.load(scratch + at + 1, mask=inside, other=0)
    wrong = inside & (value != value)
    value = tl.where(inside & (value == value), value, float("-inf"))
    best = tl.max(value, 0)
    # Blocks are in order, so the lowest place of an equal value is that of the first of them.
    token = tl.min(tl.where(inside & (value == best), place, 0x7FFFFFFF), 0)
    good = (tl.max(wrong.to(tl.int32), 0) == 0) & (tl.abs(best) < float("inf"))
    tl.store(tokens + b, token)
    tl.store(finite + b, good.to(tl.int32))
    tl.store(last + tl.load(rows + b), token)
