"""`load_rotated`: heads normalized and rotated on their way from memory; part of other kernels."""

import triton
import triton.language as tl

__all__ = ["load_rotated"]


@triton.jit
def load_rotated(
    heads,  # [N] pointers to the heads' first components
    real,  # [N] whether there is such a head; 0 where not
    norm,  # [D], or None without NORM
    rotation,  # [positions, D] float32: cosines, then sines
    position,
    eps,
    D: tl.constexpr,
    PADDED: tl.constexpr,  # D, or the next power of two
    NORM: tl.constexpr,
):
    """[N, PADDED] float32. Component i is rotated with component i + D / 2."""
    HALF: tl.constexpr = D // 2
    dim = tl.arange(0, PADDED)
    inside = dim < D
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    turn = rotation + position * D + dim % HALF
    cos = tl.load(turn, mask=inside, other=0.0)
    sin = tl.load(turn + HALF, mask=inside, other=0.0)
    sin = tl.where(dim < HALF, -sin, sin)
    both = real[:, None] & inside[None, :]
    one = tl.load(heads[:, None] + dim[None, :], mask=both, other=0.0).to(tl.float32)
    two = tl.load(heads[:, None] + partner[None, :], mask=both, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(one * one, 1) / D + eps)[:, None]
        one = one * scale * tl.load(norm + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        two = two * scale * tl.load(norm + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
    return one * cos[None, :] + two * sin[None, :]
