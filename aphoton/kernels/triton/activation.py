"""`silu_mul`: the gated activation of the MLP."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["silu_mul"]

BLOCK = 1024


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """``silu(gate) * up``, rounded once.

    :param gate_up: [n, 2 * I], gates first.
    :param out: [n, I]
    """
    n, width = out.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    _silu_mul[(n, triton.cdiv(width, block))](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4)


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)
