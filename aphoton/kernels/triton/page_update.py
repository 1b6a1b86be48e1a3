"""`update_tables`: new pages into the page tables on the device."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["update_tables"]

BLOCK = 128


def update_tables(tables: Tensor, updates: Tensor, count: int) -> None:
    """``tables[row, index] = page`` for the first ``count`` updates. No place may have two of them.

    :param tables: [R, P] int32 page ids of each engine row.
    :param updates: [N, 3] int32 of row, index and page; zeros are padding, as row 0 has page 0 everywhere.
    """
    _update_tables[(triton.cdiv(count, BLOCK),)](
        tables, updates, count, WIDTH=tables.shape[1], BLOCK=BLOCK, num_warps=1
    )


@triton.jit(do_not_specialize=["count"])
def _update_tables(tables, updates, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    update = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = update < count
    row = tl.load(updates + update * 3, mask=inside, other=0).to(tl.int64)
    index = tl.load(updates + update * 3 + 1, mask=inside, other=0)
    page = tl.load(updates + update * 3 + 2, mask=inside, other=0)
    tl.store(tables + row * WIDTH + index, page, mask=inside)
