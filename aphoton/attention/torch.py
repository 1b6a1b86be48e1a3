"""`TorchAttention`: paged attention in plain torch, on any device."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from aphoton.attention.cache import KVCache

__all__ = ["Plan", "TorchAttention"]

Ints = NDArray[np.int64]

QUERY_BLOCK = 512
"""Queries that share one mask: bounds a mask's size, and what is computed outside of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decode:
    """What rows of one query each see.

    :ivar tokens: [m] int64, where the rows' tokens are among the step's; None: they are all of them, in order.
    :ivar pages: [m * P] int64, P pages of each row.
    :ivar low, high: the part of the P * page_size gathered positions that any row sees.
    :ivar mask: [m, 1, 1, high - low], 0 or -inf, added to the scores; None where every row sees all.
    """

    tokens: Tensor | None
    pages: Tensor
    low: int
    high: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Consecutive queries of a row: tokens ``first:last`` of the step, and the keys ``low:high`` that they see.

    :ivar mask: [queries, keys], 0 or -inf; None: as many keys as queries, and plain causal attention.
    """

    first: int
    last: int
    low: int
    high: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """What a row of several queries sees.

    :ivar pages: [P] int64 with the row's keys; None: all its keys are in this step, blocks count them as tokens of it.
    """

    pages: Tensor | None
    blocks: list[_Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What the rows of a step see through one window."""

    decode: _Decode | None
    prefills: list[_Prefill]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where a step's n rows and T tokens lie; good for all layers of one step.

    :ivar positions: [T] int64, of each token in its row.
    :ivar last: [n] int64, index of each row's last token among the step's.
    :ivar slots: [T] int64, where in the cache each token's key and value go: ``page * page_size + offset``.
    """

    positions: Tensor
    last: Tensor
    slots: Tensor
    starts: Ints
    lengths: Ints
    tables: Tensor
    views: dict[int | None, _View] = field(default_factory=dict)


class TorchAttention:
    """Appends keys and values to the pages of a cache, and attends over them.

    What is masked still takes part in the arithmetic, so it must be finite: a page is zeroed when a row begins it,
    and of other pages only written positions are read (never page 0, for rows that do not own it).
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._page_size = cache.page_size
        self._device = cache.data.device

    def plan(self, starts: NDArray[np.int32], lengths: NDArray[np.int32], tables: Tensor) -> Plan:
        """Prepares a step, once for all layers.

        :param starts: [n] on the host, tokens of each row that are in the cache already.
        :param lengths: [n] on the host, tokens that each row feeds, at least 1.
        :param tables: [n, P] int32 page ids of each row, on the cache's device.
        """
        start, length = starts.astype(np.int64), lengths.astype(np.int64)
        ends = np.cumsum(length)
        rows = np.repeat(np.arange(len(length)), length)
        positions = np.arange(ends[-1]) - np.repeat(ends - length - start, length)
        tables = tables.to(torch.int64)
        page, offset = np.divmod(positions, self._page_size)
        self._clean(start, length, tables)
        return Plan(
            positions=self._put(positions),
            last=self._put(ends - 1),
            slots=tables[self._put(rows), self._put(page)] * self._page_size + self._put(offset),
            starts=start,
            lengths=length,
            tables=tables,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, window: int | None = None) -> Tensor:
        """Appends ``k`` and ``v`` and attends with ``q``.

        :param q: [T, heads, head_dim], rotated.
        :param k: [T, kv_heads, head_dim], rotated; ``v`` likewise.
        :param window: a token sees itself and ``window - 1`` tokens before it; None: all before it.
        :returns: [T, heads * head_dim]
        """
        pages = self.cache.data[layer]
        flat = pages.flatten(1, 2)
        flat[0].index_copy_(0, plan.slots, k)
        flat[1].index_copy_(0, plan.slots, v)
        view = plan.views.get(window)
        if view is None:
            view = plan.views[window] = self._view(plan, window)
        if view.decode is not None and view.decode.tokens is None:
            return _decode(q, pages, view.decode)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if view.decode is not None:
            tokens = view.decode.tokens
            assert tokens is not None
            decoded = _decode(q.index_select(0, tokens), pages, view.decode)
            out.index_copy_(0, tokens, decoded.view(-1, *q.shape[1:]))
        for prefill in view.prefills:
            _prefill(q, k, v, pages, prefill, out)
        return out.flatten(1)

    def _put(self, array: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _clean(self, starts: Ints, lengths: Ints, tables: Tensor) -> None:
        """Zeroes the pages that rows begin in this step and do not fill: what follows their tokens will be read."""
        last_page = (starts + lengths - 1) // self._page_size
        begun = np.flatnonzero((starts <= last_page * self._page_size) & ((starts + lengths) % self._page_size != 0))
        if len(begun):
            pages = tables[self._put(begun), self._put(last_page[begun])]
            self.cache.data.index_fill_(2, pages, 0)

    def _view(self, plan: Plan, window: int | None) -> _View:
        single = plan.lengths == 1
        firsts = np.cumsum(plan.lengths) - plan.lengths
        return _View(
            decode=self._plan_decode(plan, np.flatnonzero(single), firsts, window) if single.any() else None,
            prefills=[self._plan_prefill(plan, int(row), int(firsts[row]), window) for row in np.flatnonzero(~single)],
        )

    def _plan_decode(self, plan: Plan, rows: Ints, firsts: Ints, window: int | None) -> _Decode:
        size = self._page_size
        position = plan.starts[rows]
        oldest = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
        first_page, last_page = oldest // size, position // size
        count = int((last_page - first_page).max()) + 1
        # Rows with fewer pages than others repeat their last one: it is masked, and finite.
        wanted = np.minimum(first_page[:, None] + np.arange(count), last_page[:, None])
        tables = plan.tables if len(rows) == len(plan.starts) else plan.tables[self._put(rows)]
        low, high = oldest - first_page * size, position - first_page * size + 1
        bottom, top = int(low.min()), int(high.max())
        mask = None
        if (low != bottom).any() or (high != top).any():
            key = np.arange(bottom, top)
            seen = (key >= low[:, None]) & (key < high[:, None])
            mask = self._mask(seen)[:, None, None]
        return _Decode(
            tokens=None if len(rows) == len(plan.starts) else self._put(firsts[rows]),
            pages=tables.gather(1, self._put(wanted)).flatten(),
            low=bottom,
            high=top,
            mask=mask,
        )

    def _plan_prefill(self, plan: Plan, row: int, first: int, window: int | None) -> _Prefill:
        size = self._page_size
        start, length = int(plan.starts[row]), int(plan.lengths[row])
        if start == 0 and (window is None or window >= length):
            last = first + length
            return _Prefill(pages=None, blocks=[_Block(first=first, last=last, low=first, high=last, mask=None)])
        # Keys are counted from the first token of the step, or from the first page that is gathered.
        pages, base = None, -first
        if start > 0:
            base = 0 if window is None else max(start - window + 1, 0) // size * size
            pages = plan.tables[row, base // size : (start + length - 1) // size + 1]
        blocks = []
        for begin in range(start, start + length, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, start + length)
            oldest = 0 if window is None else max(begin - window + 1, 0)
            query, key = np.arange(begin, end)[:, None], np.arange(oldest, end)
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            blocks.append(
                _Block(
                    first=first + begin - start,
                    last=first + end - start,
                    low=oldest - base,
                    high=end - base,
                    mask=self._mask(seen),
                )
            )
        return _Prefill(pages=pages, blocks=blocks)

    def _mask(self, seen: NDArray[np.bool_]) -> Tensor:
        """0 where ``seen``, else -inf, to be added to scores."""
        mask = self._put(np.where(seen, np.float32(0), np.float32(-np.inf)))
        return mask.to(self.cache.data.dtype)


def _decode(q: Tensor, pages: Tensor, decode: _Decode) -> Tensor:
    """[m, heads * head_dim]. Queries that share a KV head are attended together, as if they were of one sequence."""
    rows, _, head_dim = q.shape
    kv_heads = pages.shape[3]
    gathered = pages.index_select(1, decode.pages).view(2, rows, -1, kv_heads, head_dim)
    k, v = gathered[:, :, decode.low : decode.high].transpose(2, 3)
    out = F.scaled_dot_product_attention(q.reshape(rows, kv_heads, -1, head_dim), k, v, attn_mask=decode.mask)
    return out.reshape(rows, -1)


def _prefill(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, prefill: _Prefill, out: Tensor) -> None:
    """Fills the row's part of ``out`` [T, heads, head_dim]."""
    if prefill.pages is not None:
        k, v = pages.index_select(1, prefill.pages).flatten(1, 2)
    for block in prefill.blocks:
        keys, values = (x[block.low : block.high].transpose(0, 1)[None] for x in (k, v))
        attended = F.scaled_dot_product_attention(
            q[block.first : block.last].transpose(0, 1)[None],
            keys,
            values,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            enable_gqa=True,
        )
        out[block.first : block.last] = attended[0].transpose(0, 1)
