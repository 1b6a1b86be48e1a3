"""Normalization, rotation and append of many tokens, against float32."""

import pytest
import torch
from kernels.triton.paged import Layer

rope_append = pytest.importorskip("aphoton.kernels.triton.rope_append", reason="triton is not installed")


@pytest.mark.parametrize(("dtype", "norms"), [(torch.float32, True), (torch.bfloat16, False)], ids=["norms", "plain"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 16), (4, 1, 80), (18, 2, 128)])
def test_mixed_step(heads: int, kv_heads: int, head_dim: int, norms: bool, dtype: torch.dtype, device: str) -> None:
    fed = [9, 1, 2, 1]
    layer = Layer(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        lengths=[0, 30, 16, 3],
        dtype=dtype,
        device=device,
        norms=norms,
        page_size=8,
    )
    layer.rotation = torch.randn(64, head_dim, generator=layer.generator)
    rows = torch.repeat_interleave(layer.rows, torch.tensor(fed))
    positions = torch.cat([start + torch.arange(n) for start, n in zip(layer.lengths, fed, strict=True)]).int()
    width = int(positions.max()) // 8 + 1
    layer.tables = torch.cat((layer.tables, layer.tables), dim=1)[:, : max(width, layer.tables.shape[1])].contiguous()
    tokens = len(rows)
    qkv = layer.qkv(tokens + 2)
    q, k, v = layer.split(qkv[:tokens], positions)
    keys, values = layer.appended(k, v, rows, positions)

    out = torch.full((tokens + 2, heads, head_dim), torch.nan, dtype=dtype, device=device)
    padding = torch.zeros(2, dtype=torch.int32)
    rope_append.rope_append(
        qkv.to(device),
        out,
        layer.keys,
        layer.values,
        layer.tables.to(device),
        torch.cat((rows, padding)).to(device),
        torch.cat((positions, padding)).to(device),
        layer.rotation.to(device),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_norm=None if layer.q_norm is None else layer.q_norm.to(device),
        k_norm=None if layer.k_norm is None else layer.k_norm.to(device),
        eps=layer.eps,
    )
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-2}
    torch.testing.assert_close(out[:tokens].float().cpu(), q, **close)
    torch.testing.assert_close(layer.keys[1:].float().cpu(), keys, equal_nan=True, **close)
    torch.testing.assert_close(layer.values[1:].float().cpu(), values, rtol=0, atol=0, equal_nan=True)
    assert out.isfinite().all()
