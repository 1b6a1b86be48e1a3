"""The decode step's first gather."""

import pytest
import torch

embed = pytest.importorskip("aphoton.kernels.triton.embed", reason="triton is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 576])
def test_embed(hidden: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, hidden, generator=generator).to(dtype).to(device)
    last = torch.randint(0, 50, (9,), generator=generator, dtype=torch.int32).to(device)
    rows = torch.tensor([3, 8, 1, 0, 0], dtype=torch.int32, device=device)
    out = torch.full((5, hidden), torch.nan, dtype=dtype, device=device)
    embed.embed(rows, last, table, out)
    assert torch.equal(out, table[last[rows].long()])
