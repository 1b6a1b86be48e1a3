"""Paged attention written out in float32, row by row, and random batches for it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(kw_only=True)
class Layer:
    """A layer's heads and pages, which rows have taken in no order. Batches hold padding rows, too.

    :ivar keys, values: [pages, page_size, kv_heads, head_dim]
    :ivar tables: [R, P] int32
    """

    heads: int
    kv_heads: int
    head_dim: int
    lengths: list[int]
    dtype: torch.dtype
    device: str
    page_size: int = 16
    norms: bool = False
    eps: float = 1e-5
    seed: int = 0
    padding: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        batch, width = len(self.lengths), max(self.lengths) // self.page_size + 2
        pages = batch * width + 1
        # A row's pages hold NaN where it has written nothing: what is not read must not matter.
        shape = (2, pages, self.page_size, self.kv_heads, self.head_dim)
        cache = torch.full(shape, torch.nan)
        self.tables = torch.zeros(batch + 3, width, dtype=torch.int32)
        rows = torch.randperm(batch + 2, generator=self.generator)[:batch] + 1
        taken = torch.randperm(pages - 1, generator=self.generator)[: batch * width] + 1
        self.tables[rows] = taken.view(batch, width).int()
        for row, length in zip(rows.tolist(), self.lengths, strict=True):
            for position in range(length):
                page = int(self.tables[row, position // self.page_size])
                place = cache[:, page, position % self.page_size]
                place.copy_(self.random(*place.shape))
        cache = cache.to(self.dtype)
        self.before = cache.float()
        self.keys, self.values = cache.to(self.device)
        self.rows = torch.cat((rows, torch.zeros(self.padding))).int()
        self.starts = torch.tensor(self.lengths + [0] * self.padding).int()
        angles = torch.arange(max(self.lengths) + 2)[:, None] * 0.7 ** torch.arange(self.head_dim // 2)
        self.rotation = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.q_norm = self.k_norm = None
        if self.norms:
            self.q_norm, self.k_norm = ((self.random(self.head_dim) * 0.3 + 1).to(self.dtype) for _ in range(2))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def qkv(self, tokens: int) -> Tensor:
        return self.random(tokens, (self.heads + 2 * self.kv_heads) * self.head_dim).to(self.dtype)

    def rotated(self, heads: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """[T, n, head_dim] float32."""
        heads = heads.float()
        if norm is not None:
            heads = F.rms_norm(heads, (self.head_dim,), norm.float(), self.eps)
        cos, sin = self.rotation[positions.long()][:, None].chunk(2, dim=2)
        one, two = heads.chunk(2, dim=2)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=2)

    def split(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, of tokens: [T, n, head_dim] float32 each."""
        heads = qkv.float().view(len(qkv), -1, self.head_dim)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return self.rotated(q, self.q_norm, positions), self.rotated(k, self.k_norm, positions), v

    def attended(self, qkv: Tensor, window: int) -> Tensor:
        """[B, heads * head_dim] float32 for the rows that are no padding."""
        batch = len(self.lengths)
        q, k, v = self.split(qkv[:batch], self.starts[:batch])
        out = []
        for b, (row, start) in enumerate(zip(self.rows.tolist(), self.lengths, strict=False)):
            positions = torch.arange(start)
            pages = self.tables[row, positions // self.page_size].long()
            keys, values = (
                torch.cat((cached[pages, positions % self.page_size], new[b : b + 1].to(self.dtype).float()))
                for cached, new in zip(self.before, (k, v), strict=True)
            )
            first = max(start - window + 1, 0) if window else 0
            grouped = q[b].view(self.kv_heads, -1, self.head_dim)
            keys, values = keys[first:].transpose(0, 1), values[first:].transpose(0, 1)
            weights = (grouped @ keys.transpose(1, 2) / self.head_dim**0.5).softmax(dim=2)
            out.append((weights @ values).flatten())
        return torch.stack(out)

    def appended(self, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The pages with the tokens' keys and values, as they are to be afterwards; page 0 aside."""
        after = self.before.clone()
        pages = self.tables[rows.long(), positions.long() // self.page_size].long()
        for cached, new in zip(after, (k, v), strict=True):
            cached[pages, positions.long() % self.page_size] = new
        return after[0, 1:], after[1, 1:]
