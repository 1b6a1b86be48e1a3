"""Normalization against torch's, and in float32 where torch rounds more often."""

import pytest
import torch
from torch.nn import functional as F

norm = pytest.importorskip("aphoton.kernels.triton.norm", reason="triton is not installed")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rounds(dtype: torch.dtype, device: str) -> bool:
    """Whether numbers are rounded to the nearest of ``dtype``: the interpreter cuts bfloat16 off instead."""
    return dtype != torch.bfloat16 or device == "cuda"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "hidden"), [(1, 64), (3, 576), (2, 2048), (2, 5120), (5, 75)])
def test_rms_norm(n: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(n, hidden, generator=generator) * 3).to(dtype).to(device)
    weight = (torch.randn(hidden, generator=generator) * 0.3 + 1).to(dtype).to(device)
    out = torch.full_like(x, torch.nan)
    norm.rms_norm(x, weight, 1e-5, out)
    expected = F.rms_norm(x.float(), (hidden,), weight.float(), 1e-5)
    torch.testing.assert_close(out, expected.to(dtype))
    if dtype.itemsize == 2 and rounds(dtype, device):
        # One rounding: mostly what float32 gives.
        assert (out == expected.to(dtype)).float().mean() > 0.95


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "hidden"), [(3, 576), (2, 4096)])
def test_add_rms_norm(n: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(n, hidden, generator=generator).to(dtype).to(device) for _ in range(2))
    weight = torch.randn(hidden, generator=generator).to(dtype).to(device)
    total = x + residual
    expected = F.rms_norm(total.float(), (hidden,), weight.float(), 1e-6).to(dtype)
    norm.add_rms_norm(x, residual, weight, 1e-6, x)  # in place
    if rounds(dtype, device):
        assert torch.equal(residual, total)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(x, expected)


def test_large_values_and_zeros(device: str) -> None:
    x = torch.zeros(2, 96, device=device)
    x[1] = 1e15
    out = torch.empty_like(x)
    norm.rms_norm(x, torch.ones(96, device=device), 1e-6, out)
    assert (out[0] == 0).all()
    torch.testing.assert_close(out[1], torch.ones(96, device=device))
