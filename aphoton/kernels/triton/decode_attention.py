"""`DecodeAttention`: paged attention of one new token a row; normalization, rotation and append are in it."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphoton.kernels.limits import MOST_GROUP
from aphoton.kernels.triton.rotation import load_rotated

__all__ = ["DecodeAttention"]

MOST_SPLITS = 64
PROCESSORS = 132
"""Of an H200; assumed where there is no GPU."""
SHARED_MEMORY = 232448
"""Bytes that a program may have on an H200; assumed where there is no GPU."""


class DecodeAttention:
    """Attention over the pages of one layer at a time, for batches in which each row feeds one token.

    A row's keys are split among several programs where the batch alone would not fill the GPU. The number of splits
    depends on the size of the batch and on nothing else, and how far they reach is read on the device: one CUDA graph
    of a batch size serves rows of any length. A row's result does not depend on the other rows of its batch.

    Its buffers are shared by all calls: they must be on one stream.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_batch: int,
        programs: int | None = None,
        block: int | None = None,
        warps: int | None = None,
        stages: int | None = None,
    ) -> None:
        """:param dtype: of activations and cache.
        :param programs: how many the splits aim at. None: two for each multiprocessor.
        :param block: keys that a program looks at together, a power of two of at least 16. None: as many as fit, or
            half of that where heads are small and a batch is large.
        :param warps: of a program. None: as many as hold its tiles.
        :param stages: blocks of keys in a program's hands: one that it works on, the others on their way. None: 3, or 2
            where heads and a batch are large.
        :raises ValueError: for heads that the kernel cannot serve.
        """
        if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
            raise ValueError(
                f"the decode kernel needs a head_dim that is a power of two from 16 to 256, not {head_dim}"
            )
        if heads % kv_heads or heads // kv_heads > MOST_GROUP:
            raise ValueError(
                f"the decode kernel needs up to {MOST_GROUP} query heads for each KV head, not {heads} for {kv_heads}"
            )
        device = torch.device(device)
        processors, shared_memory = PROCESSORS, SHARED_MEMORY
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            processors = properties.multi_processor_count
            shared_memory = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY)
        self._heads, self._kv_heads, self._head_dim, self._page_size = heads, kv_heads, head_dim, page_size
        self._group = heads // kv_heads
        self._programs = 2 * processors if programs is None else programs
        self._warps = (8 if dtype.itemsize > 2 else 4) if warps is None else warps
        # Two programs should fit on a multiprocessor.
        fitting = _fitting_block((stages or 3) - 1, head_dim * dtype.itemsize, shared_memory // 2)
        usual = (block or fitting, stages or 3)
        # Where a batch has more than that, they hold less, and more of them fit: measured on an H200, 7 to 20% faster.
        crowded = (block or max(fitting // 2, 16), stages or 3) if head_dim < 128 else (block or fitting, stages or 2)
        self._tiles = [crowded if batch * kv_heads > 2 * processors else usual for batch in range(max_batch + 1)]
        self._scale = math.log2(math.e) / math.sqrt(head_dim)
        self._splits = [1, *(self._choose_splits(batch) for batch in range(1, max_batch + 1))]
        parts = max((batch * splits for batch, splits in enumerate(self._splits) if splits > 1), default=1) * heads
        self._partial = torch.zeros(parts, head_dim, dtype=torch.float32, device=device)
        self._stats = torch.zeros(parts, 2, dtype=torch.float32, device=device)

    def attend(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        rows: Tensor,
        starts: Tensor,
        rotation: Tensor,
        out: Tensor,
        *,
        window: int = 0,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        """Appends each row's new key and value, and attends over all its keys.

        :param qkv: [B, (heads + 2 * kv_heads) * head_dim], not yet rotated.
        :param keys, values: of one layer, [pages, page_size, kv_heads, head_dim].
        :param tables: [R, P] int32 page ids of each engine row. Row 0 is padding: all page 0.
        :param rows: [B] int32 engine row of each batch entry.
        :param starts: [B] int32 tokens of each that are in the pages already: the position of the new one.
        :param rotation: [positions, head_dim] float32: cosines in the first half, sines in the second. Halves of a
            head are rotated against each other.
        :param out: [B, heads * head_dim]
        :param window: a token sees itself and ``window - 1`` tokens before it; 0: all before it.
        :param q_norm, k_norm: [head_dim] weights of each head's normalization, before rotation; both or none.
        """
        batch = len(qkv)
        splits, (block, stages) = self._splits[batch], self._tiles[batch]
        _attend[(batch, self._kv_heads, splits)](
            qkv,
            out,
            self._partial,
            self._stats,
            keys,
            values,
            tables,
            rows,
            starts,
            rotation,
            q_norm,
            k_norm,
            eps,
            self._scale,
            TABLE=tables.shape[1],
            HEADS=self._heads,
            KV_HEADS=self._kv_heads,
            D=self._head_dim,
            GROUP=self._group,
            PADDED=max(16, triton.next_power_of_2(self._group)),
            PAGE=self._page_size,
            BLOCK=block,
            SPLITS=splits,
            WINDOW=window,
            NORM=q_norm is not None,
            num_warps=self._warps,
            num_stages=stages,
        )
        if splits > 1:
            _combine[(batch, self._heads)](
                out,
                self._partial,
                self._stats,
                HEADS=self._heads,
                D=self._head_dim,
                SPLITS=splits,
                num_warps=min(max(splits * self._head_dim // 512, 1), 8),
            )

    def _choose_splits(self, batch: int) -> int:
        """The most, a power of two, that stay within the wanted number of programs."""
        fit = max(self._programs // (batch * self._kv_heads), 1)
        return min(1 << (fit.bit_length() - 1), MOST_SPLITS)


def _fitting_block(held: int, width: int, memory: int) -> int:
    """The most keys, up to 64, of which so many blocks and their values fit in ``memory``.

    :param width: bytes of a key.
    """
    block = 64
    while block > 16 and held * 2 * block * width > memory:
        block //= 2
    return block


@triton.jit
def _attend(
    qkv,
    out,
    partial,  # [B, HEADS, SPLITS, D] float32: weighted sums of values
    stats,  # [B, HEADS, SPLITS, 2] float32: the largest score, in powers of two, and the sum of weights
    keys,
    values,
    tables,
    rows,
    starts,
    rotation,
    q_norm,
    k_norm,
    eps,
    scale,  # of scores, in powers of two
    TABLE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,  # GROUP, at least 16: the matrix unit's rows
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
):
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + b)
    start = tl.load(starts + b)
    group = tl.arange(0, PADDED)
    real = group < GROUP
    head = h * GROUP + group
    dim = tl.arange(0, D)
    at = (b * HEADS + head) * SPLITS + split

    # This program's part of the tokens, the new one included. Parts are whole blocks, and the last may be shorter.
    first = tl.maximum(start - (WINDOW - 1), 0) if WINDOW > 0 else 0
    part = tl.cdiv(tl.cdiv(start + 1 - first, BLOCK), SPLITS) * BLOCK
    low = first + split * part
    high = tl.minimum(low + part, start + 1)
    if SPLITS > 1:  # noqa: SIM102  (one is known to the compiler, the other is not)
        if low > start:
            # What is in `partial` is not read where there are no weights.
            tl.store(stats + at * 2, tl.full([PADDED], float("-inf"), tl.float32), mask=real)
            tl.store(stats + at * 2 + 1, tl.zeros([PADDED], tl.float32), mask=real)
            return

    # Everything that the device must wait for is asked for first. Page ids are read a block ahead throughout, so that
    # keys and values need not wait for them.
    stop = tl.minimum(high, start)
    offset = tl.arange(0, BLOCK)
    pages = tables + row * TABLE
    page = tl.load(pages + (low + offset) // PAGE, mask=low + offset < stop, other=0)
    dtype = keys.dtype.element_ty
    source = qkv + b * WIDTH
    query = load_rotated(source + head * D, real, q_norm, rotation, start, eps, D, D, NORM)
    query = (query * scale).to(dtype)

    # The new token: into its page, and into this sum from registers. No other program reads it.
    one = tl.arange(0, 1)
    owned = high + one == start + 1
    new = source + (HEADS + h) * D
    new_key = load_rotated(new + one, owned, k_norm, rotation, start, eps, D, D, NORM).to(dtype)
    new_value = tl.load(new + KV_HEADS * D + dim, mask=owned, other=0.0).to(dtype)
    new_page = tl.load(pages + start // PAGE).to(tl.int64)
    new_place = ((new_page * PAGE + start % PAGE) * KV_HEADS + h) * D
    tl.store(keys + new_place + dim[None, :], new_key, mask=owned[:, None])
    tl.store(values + new_place + dim, new_value, mask=owned)
    score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1)
    best = tl.where(owned, score, float("-inf"))
    total = tl.zeros([PADDED], tl.float32) + tl.where(owned, 1.0, 0.0)
    acc = tl.zeros([PADDED, D], tl.float32) + new_value.to(tl.float32)[None, :]

    for begin in range(low, stop, BLOCK):
        position = begin + offset
        seen = position < stop
        place = ((page.to(tl.int64) * PAGE + position % PAGE) * KV_HEADS + h) * D
        page = tl.load(pages + (position + BLOCK) // PAGE, mask=position + BLOCK < stop, other=0)
        key = tl.load(keys + place[None, :] + dim[:, None], mask=seen[None, :], other=0.0)
        value = tl.load(values + place[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(best - larger)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(dtype), value, acc * shrink[:, None], input_precision="ieee")
        best = larger

    if SPLITS == 1:
        target = out + b * (HEADS * D) + head[:, None] * D + dim[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        tl.store(partial + at[:, None] * D + dim[None, :], acc, mask=real[:, None])
        tl.store(stats + at * 2, best, mask=real)
        tl.store(stats + at * 2 + 1, total, mask=real)


@triton.jit
def _combine(out, partial, stats, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, D)
    at = (b * HEADS + h) * SPLITS + tl.arange(0, SPLITS)
    best = tl.load(stats + at * 2)
    total = tl.load(stats + at * 2 + 1)
    acc = tl.load(partial + at[:, None] * D + dim[None, :])
    # Not `total > 0`: NaN must come through. An empty part's `acc` is of an earlier call, and may be anything.
    filled = total != 0.0
    weight = tl.where(filled, tl.exp2(best - tl.max(best, 0)), 0.0)
    acc = tl.where(filled[:, None], acc * weight[:, None], 0.0)
    result = tl.sum(acc, 0) / tl.sum(total * weight, 0)
    tl.store(out + (b * HEADS + h) * D + dim, result.to(out.dtype.element_ty))
