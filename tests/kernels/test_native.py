"""The native decoder against the torch one, on every option of an architecture, and what it refuses."""

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.decoders import Rows, needs_compiler, random_decoder

from aphoton.attention import KVCache
from aphoton.errors import ModelError
from aphoton.kernels import NativeUnavailable, library, native
from aphoton.kernels.native import NativeDecoder
from aphoton.models import Decoder, RopeScaling, StepInput
from aphoton.models.decoder import tensor_shapes

pytestmark = needs_compiler

POSITIONS = 2048

CASES: dict[str, dict[str, object]] = {
    "llama": {},
    "tied embeddings": {"tie_embeddings": True},
    "biases": {"qkv_bias": True, "o_bias": True},
    "norms of queries and keys": {"qk_norm": True, "head_dim": 20},
    "windows": {"layer_windows": (None, 7, 100)},
    "a KV head per head": {"num_kv_heads": 4},
    "nine heads to three": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "seven heads to one": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 32},
    "eighty heads to forty": {"num_heads": 80, "num_kv_heads": 40, "head_dim": 8},
    "64 heads to one": {"num_heads": 64, "num_kv_heads": 1, "head_dim": 8},
    "odd sizes": {"vocab_size": 101, "hidden_size": 75, "intermediate_size": 91, "head_dim": 6, "tie_embeddings": True},
    "head_dim 80": {"head_dim": 80},
    "head_dim 128": {"head_dim": 128},
    # Deeper than what is gone over at once of each cache.
    "deep": {"intermediate_size": 1501, "hidden_size": 740, "num_layers": 2},
    "dynamic rotation": {"rope_scaling": RopeScaling(kind="dynamic", factor=2.0, original_max_len=100)},
    "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_len=64)},
}


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def ragged() -> Iterator[dict[int, Sequence[int]]]:
    """Steps that mix prefill, chunks and decode: over block, segment and page limits, and beyond some windows."""
    yield {0: tokens(3, 0)}
    yield {0: [5], 1: tokens(64, 1), 2: tokens(150, 2)}
    yield {2: tokens(1, 3), 0: tokens(65, 4), 3: tokens(511, 5)}
    yield {3: [1], 1: [2], 0: [3]}
    yield {3: tokens(30, 6), 2: [7]}
    yield {3: [8], 2: [9]}
    yield {row: [row] for row in range(12)}


def written(rows: Rows) -> torch.Tensor:
    """The cache, in float32. The reference puts zeros where a page is not full, this leaves it as it was."""
    return rows.kv.data.float().nan_to_num()


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        *((name, 16) for name in CASES),
        ("windows", 1),
        ("tied embeddings", 64),
        ("nine heads to three", 1),
        ("odd sizes", 64),
    ],
)
def test_float32_logits(name: str, page_size: int) -> None:
    weights = random_decoder(**CASES[name])
    reference = Rows(weights, weights.config, torch.float32, page_size=page_size)
    own = NativeDecoder(random_decoder(**CASES[name]), positions=POSITIONS, threads=2)
    rows = Rows(own, weights.config, torch.float32, page_size=page_size)
    for step in ragged():
        torch.testing.assert_close(rows.feed(step), reference.feed(step), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(written(rows), written(reference), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_logits(name: str) -> None:
    # Beside a decoder that holds the same numbers as float32, only the cache is rounded here.
    weights = random_decoder(torch.bfloat16, held_as=torch.float32, **CASES[name])
    reference = Rows(weights, weights.config, torch.float32)
    own = NativeDecoder(random_decoder(torch.bfloat16, **CASES[name]), positions=POSITIONS, threads=2)
    rows = Rows(own, weights.config, torch.bfloat16)
    for step in ragged():
        expected = reference.feed(step)
        torch.testing.assert_close(rows.feed(step), expected, atol=0.05 * max(1.0, float(expected.std())), rtol=0.02)
    torch.testing.assert_close(written(rows), written(reference), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("flag", ["-DLANES=4", "-DLANES=16", "-fsanitize=undefined"])
def test_other_builds(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of other machines' widths, and a build that ends the process at undefined behaviour."""
    monkeypatch.setattr(native, "load_library", lambda: library.load_library("-O0", flag, "-fno-sanitize-recover"))
    for name, dtype, tolerance in (
        ("nine heads to three", torch.float32, 1e-4),
        ("windows", torch.bfloat16, 0.05),
        ("odd sizes", torch.bfloat16, 0.4),  # tied: larger logits
    ):
        weights = random_decoder(dtype, held_as=torch.float32, **CASES[name])
        reference = Rows(weights, weights.config, torch.float32)
        own = NativeDecoder(random_decoder(dtype, **CASES[name]), positions=POSITIONS, threads=2)
        rows = Rows(own, weights.config, dtype)
        for step in ragged():
            torch.testing.assert_close(rows.feed(step), reference.feed(step), atol=tolerance, rtol=tolerance)


def test_a_faulty_row_is_seen_and_stays_alone() -> None:
    weights, healthy = random_decoder(), random_decoder()
    config = weights.config
    weights.embed[50] = torch.nan
    rows = Rows(NativeDecoder(weights, positions=64, threads=2), config, torch.float32)
    expected = Rows(NativeDecoder(healthy, positions=64, threads=2), config, torch.float32)
    faulty, fine = rows.feed({0: [50, 1, 2], 1: [4, 5]})
    assert faulty.isnan().all()
    assert torch.equal(fine, expected.feed({1: [4, 5]})[0])
    faulty, fine = rows.feed({0: [3], 1: [6]})
    assert faulty.isnan().all()
    assert torch.equal(fine, expected.feed({1: [6]})[0])


def test_weights_are_taken_over() -> None:
    weights = random_decoder()
    held = [weakref.ref(matrix) for layer in weights.layers for matrix in (layer.qkv, layer.down)]
    own = NativeDecoder(weights, positions=64, threads=1)
    gc.collect()
    assert len(weights.layers) == 0
    assert all(matrix() is None for matrix in held)
    assert own.threads == 1


def test_default_threads() -> None:
    usable = NativeDecoder(random_decoder(), positions=64).threads
    assert 1 <= usable <= min(os.cpu_count() or 1, torch.get_num_threads())


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads where Linux lists them")
def test_threads_end_with_their_decoder() -> None:
    before = len(os.listdir("/proc/self/task"))
    decoders = [NativeDecoder(random_decoder(), positions=64, threads=3) for _ in range(4)]
    assert len(os.listdir("/proc/self/task")) == before + 8
    del decoders
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == before


def mapped() -> int:
    """Bytes of addresses that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.isfile("/proc/self/statm"), reason="reads what Linux says of the process")
def test_memory_that_does_not_suffice_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it ends: before the weights' memory, or between that and the threads'."""
    import resource

    weights = random_decoder(head_dim=512, num_heads=1, num_kv_heads=1)  # 1.8 MB, and half a MB for a thread
    NativeDecoder(random_decoder(), positions=64, threads=1)
    loaded = native.load_library()
    create, spare = loaded.aphoton_create, 0

    def scarce(shape: object) -> object:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped() + spare, hard))
        try:
            return create(shape)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    monkeypatch.setattr(loaded, "aphoton_create", scarce)
    before = mapped()
    while weights.layers:  # which are taken when there is enough at last
        with contextlib.suppress(MemoryError):
            NativeDecoder(weights, positions=64, threads=1)
        spare += 1 << 16
    assert spare > 1 << 21
    assert mapped() - before < 1 << 22


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads where Linux lists them")
def test_weights_that_end_early() -> None:
    config = random_decoder().config
    shapes = tensor_shapes(config)
    del shapes["model.layers.1.mlp.down_proj.weight"]
    tensors = ((name, torch.zeros(shape)) for name, shape in shapes.items())
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(ModelError, match=r"^here: tensor model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        NativeDecoder(Decoder.open(config, tensors, source="here"), positions=64, threads=3)
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == before


def test_two_decoders_in_two_threads() -> None:
    def run(seed: int) -> list[torch.Tensor]:
        weights = random_decoder(seed=seed)
        own = NativeDecoder(weights, positions=POSITIONS, threads=2)
        rows = Rows(own, weights.config, torch.float32)
        return [rows.feed(step) for _ in range(2) for step in ragged()]

    alone = [run(seed) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, (0, 1)))
    for first, second in zip(alone, together, strict=True):
        assert all(map(torch.equal, first, second))


def test_one_decoder_in_two_threads() -> None:
    weights = random_decoder()
    config = weights.config
    own = NativeDecoder(weights, positions=POSITIONS, threads=2)
    barrier = threading.Barrier(3)

    def run(_: int) -> list[torch.Tensor]:
        rows = Rows(own, config, torch.float32)
        barrier.wait()
        return [rows.feed(step) for step in ragged()]

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(run, range(3))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, third))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.tensor([1, 97, 3])}, "vocabulary"),
        ({"tokens": torch.tensor([1, -1, 3])}, "vocabulary"),
        ({"tokens": torch.tensor([1, 2])}, "starts and lengths"),
        ({"tokens": torch.tensor([1, 2, 3], dtype=torch.int32)}, "torch.int64"),
        ({"lengths": torch.tensor([3, 0], dtype=torch.int32)}, "starts and lengths"),
        ({"lengths": torch.tensor([3], dtype=torch.int32)}, "different rows"),
        ({"starts": torch.tensor([0, -1], dtype=torch.int32)}, "starts and lengths"),
        ({"starts": torch.tensor([0, 64], dtype=torch.int32)}, "positions"),
        ({"starts": torch.tensor([0, 40], dtype=torch.int32)}, "page table"),
        ({"tables": torch.tensor([[1, 0], [256, 0]], dtype=torch.int32)}, "page table"),
        ({"tables": torch.tensor([[-1, 0], [1, 0]], dtype=torch.int32)}, "page table"),
        ({"tables": torch.tensor([[1, 2], [0, 0]], dtype=torch.int32).T}, "contiguous"),
    ],
)
def test_steps_that_do_not_fit(change: dict[str, torch.Tensor], message: str) -> None:
    weights = random_decoder()
    config = weights.config
    own = NativeDecoder(weights, positions=64, threads=1)
    rows = Rows(own, config, torch.float32)
    step = rows.step({0: [1, 2], 1: [3]})
    own.forward(step, rows.kv)
    before = rows.kv.data.clone()
    with pytest.raises(ValueError, match=message):
        own.forward(replace(step, **change), rows.kv)
    torch.testing.assert_close(rows.kv.data, before, atol=0, rtol=0, equal_nan=True)


def test_a_rotary_table_is_filled_as_far_as_steps_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context length that is damaged takes no memory and no time, and no bit depends on when a part is filled."""
    monkeypatch.setattr(native, "ROTARY_AT_ONCE", 4)
    monkeypatch.setattr(native, "ROTARY_AT_FIRST", 8)
    weights = random_decoder()
    config = weights.config
    rows = Rows(NativeDecoder(weights, positions=83_886_144, threads=2), config, torch.float32)
    monkeypatch.undo()
    whole = Rows(NativeDecoder(random_decoder(), positions=POSITIONS, threads=2), config, torch.float32)
    for step in ragged():
        assert all(map(torch.equal, rows.feed(step), whole.feed(step)))
    with pytest.raises(MemoryError, match="rotary table of 1000000000000000 positions"):
        NativeDecoder(random_decoder(), positions=10**15)


def test_a_cache_that_does_not_fit() -> None:
    weights = random_decoder()
    config = weights.config
    own = NativeDecoder(weights, positions=64, threads=1)
    rows = Rows(own, config, torch.float32)
    step: StepInput = rows.step({0: [1, 2], 1: [3]})
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        own.forward(step, Rows(own, config, torch.bfloat16).kv)
    other = KVCache(layers=2, pages=4, page_size=16, kv_heads=2, head_dim=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="not one of this model"):
        own.forward(step, other)


@pytest.mark.parametrize(
    ("dtype", "settings", "message"),
    [
        (torch.float16, {}, "float16"),
        (torch.float32, {"head_dim": 514}, "head_dim"),
        (torch.float32, {"num_heads": 65, "num_kv_heads": 1}, "query heads"),
    ],
)
def test_models_that_it_cannot_run(dtype: torch.dtype, settings: dict[str, object], message: str) -> None:
    weights = random_decoder(dtype, **settings)
    with pytest.raises(NativeUnavailable, match=message):
        NativeDecoder(weights, positions=64)
    assert len(weights.layers) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_another_has_taken(tied: bool) -> None:
    weights = random_decoder(tie_embeddings=tied)
    NativeDecoder(weights, positions=64, threads=1)
    with pytest.raises(ValueError, match="handed over before"):
        NativeDecoder(weights, positions=64, threads=1)
