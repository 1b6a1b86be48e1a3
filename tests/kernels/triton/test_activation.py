"""The gated activation against torch's in float32."""

import pytest
import torch
from torch.nn import functional as F

activation = pytest.importorskip("aphoton.kernels.triton.activation", reason="triton is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "width"), [(1, 16), (3, 1536), (2, 2731)])
def test_silu_mul(n: int, width: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = (torch.randn(n, 2 * width, generator=generator) * 4).to(dtype).to(device)
    out = torch.full((n, width), torch.nan, dtype=dtype, device=device)
    activation.silu_mul(gate_up, out)
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(out, (F.silu(gate) * up).to(dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of the interpreter: e ** 200 is infinite, as meant
def test_far_values(device: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]], device=device)
    out = torch.empty(1, 3, device=device)
    activation.silu_mul(gate_up, out)
    torch.testing.assert_close(out, torch.tensor([[0.0, 600.0, 0.0]], device=device))
