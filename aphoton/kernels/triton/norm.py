"""`rms_norm` and `add_rms_norm`: root mean square normalization of each token."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """:param x: [n, H]; ``out`` likewise, and may be ``x``.
    :param weight: [H]
    """
    n, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _rms_norm[(n,)](x, weight, out, eps, H=hidden, BLOCK=block, num_warps=_warps(block))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Adds ``x`` to ``residual``, in place and rounded to its dtype, and normalizes the sum.

    :param x: [n, H]; ``residual`` and ``out`` likewise, and ``out`` may be ``x``.
    :param weight: [H]
    """
    n, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(n,)](x, residual, weight, out, eps, H=hidden, BLOCK=block, num_warps=_warps(block))


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)


@triton.jit
def _rms_norm(x, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / H + eps) * factor
    tl.store(out + at + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(x, residual, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + at + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = value.to(residual.dtype.element_ty)
    tl.store(residual + at + column, total, mask=inside)
    value = total.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / H + eps) * factor
    tl.store(out + at + column, value.to(out.dtype.element_ty), mask=inside)
