"""`rope_append`: what comes before attention in steps that prefill."""

import triton
import triton.language as tl
from torch import Tensor

from aphoton.kernels.triton.rotation import load_rotated

__all__ = ["rope_append"]

TILE = 2048
"""Components that one program takes."""


def rope_append(
    qkv: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    rotation: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Normalizes (if there are norms) and rotates queries and keys, and appends keys and values to their pages.

    :param qkv: [T, (heads + 2 * kv_heads) * head_dim]
    :param q: [T, heads, head_dim]: the rotated queries are written here.
    :param keys, values: of one layer, [pages, page_size, kv_heads, head_dim].
    :param tables: [R, P] int32 page ids of each engine row.
    :param token_rows: [T] int32 engine row of each token.
    :param positions: [T] int32 of each token in its row.
    :param rotation: [positions, head_dim] float32: cosines in the first half, sines in the second. Halves of a head
        are rotated against each other.
    :param q_norm, k_norm: [head_dim], both or none.
    """
    padded = triton.next_power_of_2(head_dim)
    block = min(max(TILE // padded, 1), triton.next_power_of_2(heads))
    query_blocks, key_blocks = triton.cdiv(heads, block), triton.cdiv(kv_heads, block)
    _rope_append[(len(qkv), query_blocks + key_blocks)](
        qkv,
        q,
        keys,
        values,
        tables,
        token_rows,
        positions,
        rotation,
        q_norm,
        k_norm,
        eps,
        TABLE=tables.shape[1],
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        PADDED=padded,
        PAGE=keys.shape[1],
        BLOCK=block,
        NORM=q_norm is not None,
        num_warps=4,
    )


@triton.jit
def _rope_append(
    qkv,
    q,
    keys,
    values,
    tables,
    token_rows,
    positions,
    rotation,
    q_norm,
    k_norm,
    eps,
    TABLE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,  # D, or the next power of two
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # heads of one program
    NORM: tl.constexpr,
):
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    t, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + t).to(tl.int64)
    dim = tl.arange(0, PADDED)
    inside = dim < D
    if block < QUERY_BLOCKS:
        head = block * BLOCK + tl.arange(0, BLOCK)
        real = head < HEADS
        query = load_rotated(qkv + t * WIDTH + head * D, real, q_norm, rotation, position, eps, D, PADDED, NORM)
        target = q + t * (HEADS * D) + head[:, None] * D + dim[None, :]
        tl.store(target, query.to(q.dtype.element_ty), mask=real[:, None] & inside[None, :])
    else:
        head = (block - QUERY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        real = head < KV_HEADS
        both = real[:, None] & inside[None, :]
        row = tl.load(token_rows + t).to(tl.int64)
        page = tl.load(tables + row * TABLE + position // PAGE).to(tl.int64)
        place = ((page * PAGE + position % PAGE) * KV_HEADS + head[:, None]) * D + dim[None, :]
        source = qkv + t * WIDTH + (HEADS + head) * D
        key = load_rotated(source, real, k_norm, rotation, position, eps, D, PADDED, NORM)
        tl.store(keys + place, key.to(keys.dtype.element_ty), mask=both)
        value = tl.load(source[:, None] + KV_HEADS * D + dim[None, :], mask=both, other=0.0)
        tl.store(values + place, value.to(values.dtype.element_ty), mask=both)
