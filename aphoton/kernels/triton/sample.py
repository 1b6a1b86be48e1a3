"""`sample` and `sample_ruled`: a token for each row, from its logits and its state."""

import triton
import triton.language as tl
from torch import Tensor

from aphoton.kernels.triton.sampler_state import STATE_WORDS, SamplerState

__all__ = ["sample", "sample_ruled"]

BLOCK = 4096
"""Logits that are looked at together."""
FARTHEST = tl.constexpr(0x42D00000)
"""The bits of 104.0: e to the minus that is 0 in float32, so that nothing farther below the largest logit counts."""


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
    :param last, tokens: see `sample`; of ``tokens``, those at ``places`` are written.
    :param finite: [B] int32, what `sample` or `argmax` has found of the logits as they were: of those at ``places``, 1
        becomes -1 where the rules leave none that is finite.
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
    if (PARTS > 0) & (row == 0):
        return
    count = tl.load(counts + b)
    logits += b.to(tl.int64) * VOCAB
    state += row.to(tl.int64) * STATE
    temperature = tl.load(state + 2).to(tl.float32, bitcast=True)
    banned = state + STATE_WORDS
    offset = tl.arange(0, BLOCK)
    if PARTS > 0:
        # `adjust` has looked at the blocks of these logits, and left nothing of what is banned.
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
    if PARTS > 0:
        tl.store(finite + at, tl.where(good, 1, -1), mask=tl.load(finite + at) != 0)
    else:
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
