"""Decode attention against float32: lengths around every limit, groups, windows, splits, and rows beside each other."""

import pytest
import torch
from kernels.triton.paged import Layer
from torch import Tensor

decode_attention = pytest.importorskip("aphoton.kernels.triton.decode_attention", reason="triton is not installed")

TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
RAGGED = [0, 1, 16, 63, 64, 65, 200]


def attend(layer: Layer, qkv: Tensor, *, window: int = 0, programs: int | None = None, **settings: object) -> Tensor:
    """[B, heads * head_dim] on the host."""
    batch, device = len(qkv), layer.device
    attention = decode_attention.DecodeAttention(
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        page_size=layer.page_size,
        dtype=layer.dtype,
        device=device,
        max_batch=batch + 1,
        programs=programs,
        **settings,
    )
    # Parts without tokens must not count whatever an earlier call left behind.
    attention._partial.fill_(torch.nan)
    out = torch.full((batch, layer.heads * layer.head_dim), torch.nan, dtype=layer.dtype, device=device)
    attention.attend(
        qkv.to(device),
        layer.keys,
        layer.values,
        layer.tables.to(device),
        layer.rows.to(device),
        layer.starts.to(device),
        layer.rotation.to(device),
        out,
        window=window,
        q_norm=None if layer.q_norm is None else layer.q_norm.to(device),
        k_norm=None if layer.k_norm is None else layer.k_norm.to(device),
        eps=layer.eps,
    )
    return out.cpu()


def check(layer: Layer, *, window: int = 0, programs: int | None = None, **settings: object) -> None:
    batch = len(layer.lengths)
    qkv = layer.qkv(batch + layer.padding)
    out = attend(layer, qkv, window=window, programs=programs, **settings)
    assert out.isfinite().all()  # padding rows, too
    torch.testing.assert_close(out[:batch].float(), layer.attended(qkv, window), **TOLERANCE[layer.dtype])
    _, k, v = layer.split(qkv[:batch], layer.starts[:batch])
    keys, values = layer.appended(k, v, layer.rows[:batch], layer.starts[:batch])
    close = {"equal_nan": True, **TOLERANCE[layer.dtype]}
    torch.testing.assert_close(layer.keys[1:].float().cpu(), keys, **close)
    torch.testing.assert_close(layer.values[1:].float().cpu(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("programs", [1, 36], ids=["whole", "split"])
def test_ragged(programs: int, dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16, not the numbers")
    layer = Layer(heads=6, kv_heads=2, head_dim=64, lengths=RAGGED, dtype=dtype, device=device, padding=2)
    check(layer, programs=programs)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 32), (8, 2, 128), (3, 1, 16), (1, 1, 256), (20, 1, 16)]
)
def test_heads(heads: int, kv_heads: int, head_dim: int, device: str) -> None:
    lengths = [0, 40, 100]
    layer = Layer(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, lengths=lengths, dtype=torch.float32, device=device
    )
    check(layer, programs=3 * kv_heads * 2)


@pytest.mark.parametrize("programs", [1, 16], ids=["whole", "split"])
@pytest.mark.parametrize("window", [1, 37, 130])
def test_windows(window: int, programs: int, device: str) -> None:
    lengths = [0, 1, 36, 37, 64, 129, 150]
    layer = Layer(heads=3, kv_heads=1, head_dim=16, lengths=lengths, dtype=torch.float32, device=device, padding=1)
    check(layer, window=window, programs=programs, block=16)


@pytest.mark.parametrize("splits", [2, 8])
def test_norms(splits: int, device: str) -> None:
    layer = Layer(heads=4, kv_heads=2, head_dim=32, lengths=[0, 33, 90], dtype=torch.float32, device=device, norms=True)
    check(layer, programs=3 * 2 * splits)


@pytest.mark.parametrize("page_size", [1, 16, 20, 256])
def test_page_sizes(page_size: int, device: str) -> None:
    lengths = [0, 5, 19, 20, 70]
    layer = Layer(
        heads=2, kv_heads=1, head_dim=16, lengths=lengths, dtype=torch.float32, device=device, page_size=page_size
    )
    check(layer, programs=20)


def test_every_length_has_one_program_that_appends(device: str) -> None:
    lengths = [*range(18), *range(30, 35), *range(46, 50)]
    layer = Layer(heads=1, kv_heads=1, head_dim=16, lengths=lengths, dtype=torch.float32, device=device)
    check(layer, programs=27 * 2, block=16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: NaN is meant
@pytest.mark.parametrize("programs", [1, 12], ids=["whole", "split"])
def test_neighbours_do_not_matter(programs: int, device: str) -> None:
    """A row's result is the same bits, whatever the rows beside it are: short, long, or full of NaN."""
    results = []
    for others in ([3, 9], [200, 150]):
        lengths = [70, *others]
        layer = Layer(heads=3, kv_heads=1, head_dim=32, lengths=lengths, dtype=torch.float32, device=device, seed=3)
        row = int(layer.rows[0])
        generator = torch.Generator().manual_seed(9)
        for position in range(70):
            page = int(layer.tables[row, position // 16])
            for cached in (layer.keys, layer.values):
                cached[page, position % 16] = torch.randn(1, 32, generator=generator).to(device)
        qkv = torch.full((3, 5 * 32), torch.nan)
        qkv[0] = torch.randn(5 * 32, generator=generator)
        out = attend(layer, qkv, programs=programs, block=16)
        assert out[0].isfinite().all() and out[1:].isnan().all()
        results.append(out[0])
    assert torch.equal(*results)


def test_splits_follow_the_batch() -> None:
    attention = decode_attention.DecodeAttention(
        heads=32,
        kv_heads=8,
        head_dim=64,
        page_size=16,
        dtype=torch.bfloat16,
        device="cpu",
        max_batch=256,
        programs=264,
    )
    assert [attention._splits[batch] for batch in (1, 2, 3, 4, 8, 16, 17, 33, 256)] == [32, 16, 8, 8, 4, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 80), (4, 2, 8), (4, 2, 512), (65, 1, 64), (3, 2, 64)]
)
def test_what_it_does_not_serve(heads: int, kv_heads: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match="the decode kernel needs"):
        decode_attention.DecodeAttention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=16,
            dtype=torch.float32,
            device="cpu",
            max_batch=1,
        )


@pytest.mark.parametrize(
    ("head_dim", "few", "many"),
    [(64, (64, 3), (32, 3)), (128, (64, 3), (64, 2)), (256, (32, 3), (32, 2)), (16, (64, 3), (32, 3))],
)
def test_programs_of_a_large_batch_hold_less(
    head_dim: int, few: tuple[int, int], many: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "PROCESSORS", 4)
    attention = decode_attention.DecodeAttention(
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        page_size=16,
        dtype=torch.bfloat16,
        device="meta",
        max_batch=6,
    )
    assert attention._tiles[1:] == [few] * 4 + [many] * 2


@pytest.mark.parametrize(("head_dim", "tile"), [(64, {"block": 32}), (128, {"stages": 2})])
def test_the_tiles_of_a_large_batch(head_dim: int, tile: dict[str, int], device: str) -> None:
    layer = Layer(heads=4, kv_heads=2, head_dim=head_dim, lengths=RAGGED, dtype=torch.float32, device=device, padding=2)
    check(layer, programs=1, **tile)
