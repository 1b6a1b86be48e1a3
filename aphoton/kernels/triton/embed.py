"""`embed`: the embeddings of the tokens that rows sampled last."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["embed"]


def embed(rows: Tensor, last: Tensor, table: Tensor, out: Tensor) -> None:
    """``out[b] = table[last[rows[b]]]``.

    :param rows: [B] int32 engine row of each batch entry.
    :param last: [R] int32 last token of each engine row.
    :param table: [V, H]
    :param out: [B, H]
    """
    n, hidden = out.shape
    block = triton.next_power_of_2(hidden)
    _embed[(n,)](rows, last, table, out, H=hidden, BLOCK=block, num_warps=min(max(block // 512, 1), 8))


@triton.jit
def _embed(rows, last, table, out, H: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < H
    token = tl.load(last + tl.load(rows + b)).to(tl.int64)
    value = tl.load(table + token * H + column, mask=inside)
    tl.store(out + b.to(tl.int64) * H + column, value.to(out.dtype.element_ty), mask=inside)
