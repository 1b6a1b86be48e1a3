"""The sampler on the device against the one on the CPU."""

import numpy as np
import pytest
import torch
from torch import Tensor

from aphoton.sampling.row import RowSampling
from aphoton.sampling.sampler import Sampler, uniforms

sample = pytest.importorskip("aphoton.kernels.triton.sample", reason="triton is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")
SamplerState = pytest.importorskip("aphoton.kernels.triton.sampler_state").SamplerState
tl = triton.language

# Of the interpreter, whose numpy says what infinite logits and small numbers do; it is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROWS = 6


def run(
    logits: Tensor, samplings: list[RowSampling], counts: list[int], device: str
) -> tuple[list[int], list[int], list[int]]:
    """Tokens and finite of the kernel, and the tokens of the CPU's sampler. Rows are given out from the last."""
    batch = len(samplings)
    state = SamplerState(ROWS, 3, logits.shape[1], device)
    sampler = Sampler(max_rows=ROWS)
    rows = np.arange(ROWS, ROWS - batch, -1, dtype=np.int32)
    for row, sampling in zip(rows.tolist(), samplings, strict=True):
        sampling.row = row
        state.admit([sampling])
        sampler.admit(sampling)
    last = torch.full((ROWS + 1,), -7, dtype=torch.int32, device=device)
    tokens, finite = (torch.full((batch,), -7, dtype=torch.int32, device=device) for _ in range(2))
    given = logits.clone().to(device)
    on_device = [torch.from_numpy(a).to(device) for a in (rows, np.array(counts, np.int32))]
    sample.sample(given, *on_device, state, last, tokens, finite)
    assert torch.equal(given.cpu().nan_to_num(nan=7.5), logits.nan_to_num(nan=7.5))
    assert torch.equal(last[on_device[0].long()], tokens) and (last[: ROWS + 1 - batch] == -7).all()
    expected = sampler.sample(logits.float().clone(), rows, np.array(counts, np.int32))
    assert finite.tolist() == expected.finite.int().tolist()
    return tokens.tolist(), finite.tolist(), expected.tokens.tolist()


def random_logits(batch: int, vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed)) * scale


KINDS: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_k beyond": {"temperature": 1.0, "top_k": 10**12},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "small top_p": {"temperature": 1.0, "top_p": 0.01},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    "wide top_k": {"temperature": 2.0, "top_k": 900, "top_p": 0.95},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [97, 5003])
def test_as_the_cpu(vocab: int, kind: str, device: str) -> None:
    samplings = [RowSampling(seed=2**64 - 1 - 977 * i, **KINDS[kind]) for i in range(3)]
    tokens, _, expected = run(random_logits(3, vocab, seed=vocab), samplings, [0, 1, 2], device)
    assert tokens == expected  # rounding could show, but these seeds are not at any limit


def test_many_seeds(device: str) -> None:
    differing = 0
    kinds = list(KINDS.values())
    steps = 4 if device == "cpu" else 200
    for step in range(steps):
        samplings = [RowSampling(seed=step + i, **kinds[(step + i) % len(kinds)]) for i in range(ROWS)]
        tokens, _, expected = run(random_logits(ROWS, 300, seed=step), samplings, [step] * ROWS, device)
        differing += sum(a != b for a, b in zip(tokens, expected, strict=True))
    assert differing <= steps * ROWS / 100


def test_mixed_batch_in_bfloat16(device: str) -> None:
    """Ties everywhere: what is as likely as the last that a filter keeps is kept."""
    kinds = [{}, *(KINDS[kind] for kind in ("temperature", "top_k", "small top_p", "all", "wide top_k"))]
    samplings = [RowSampling(seed=i, **kind) for i, kind in enumerate(kinds)]
    logits = random_logits(len(kinds), 2500, seed=5).bfloat16()
    tokens, finite, expected = run(logits, samplings, list(range(len(kinds))), device)
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) == 0
    assert finite == [1] * len(kinds)


def test_greedy(device: str) -> None:
    logits = random_logits(3, 5003, seed=0)
    logits[1, [4500, 1234, 4096]] = 50.0
    logits[2] = 0.0
    tokens, _, _ = run(logits, [RowSampling(seed=0) for _ in range(3)], [0, 1, 2], device)
    assert tokens == [int(logits[0].argmax()), 1234, 0]


def test_a_row_is_its_own(device: str) -> None:
    sampling = {"seed": 11, "temperature": 1.0, "top_p": 0.9}
    logits = random_logits(4, 500, seed=1)
    alone, _, _ = run(logits[2:3], [RowSampling(**sampling)], [5], device)
    beside = [RowSampling(seed=i, temperature=0.3 * i) for i in range(4)]
    beside[2] = RowSampling(**sampling)
    together, _, _ = run(logits, beside, [0, 9, 5, 2], device)
    assert together[2] == alone[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans(temperature: float, device: str) -> None:
    logits = random_logits(4, 200, seed=2, scale=1.0)
    logits[:, [3, 150]] = 30.0
    samplings = [
        RowSampling(seed=i, temperature=temperature, min_tokens=4, banned=banned)
        for i, banned in enumerate([(3, 150), (3, 150), (150, 3, 199), (150,)])
    ]
    tokens, finite, expected = run(logits, samplings, [3, 4, 0, 3], device)
    assert tokens == expected and finite == [1] * 4
    assert tokens[0] not in (3, 150) and tokens[1] in (3, 150) and tokens[2] not in (3, 150) and tokens[3] == 3


def test_what_is_not_finite(device: str) -> None:
    logits = random_logits(6, 5000, seed=3)
    logits[0, 3000] = torch.nan
    logits[1] = torch.nan
    logits[2, 4321] = torch.inf
    logits[3] = -torch.inf
    logits[4, :4999] = -torch.inf
    for temperature in (0.0, 1.0):
        samplings = [RowSampling(seed=i, temperature=temperature, top_k=3) for i in range(6)]
        tokens, finite, _ = run(logits, samplings, [0] * 6, device)
        assert finite == [0, 0, 0, 0, 1, 1]
        assert all(0 <= token < 5000 for token in tokens)
        assert tokens[4] == 4999


def test_temperatures_that_overflow(device: str) -> None:
    logits = random_logits(3, 300, seed=4, scale=100.0)
    samplings = [RowSampling(seed=1, temperature=t, top_k=40, top_p=0.9) for t in (1e-44, 1e-30, 100.0)]
    tokens, _, expected = run(logits, samplings, [0, 0, 0], device)
    assert tokens == expected
    assert tokens[:2] == logits[:2].argmax(dim=1).tolist()


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [0, 1, 2, 4]),  # ties are kept
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.29}, [1]),
        ({"top_p": 0.31}, [0, 1, 2, 4]),
        ({"top_p": 0.91}, [0, 1, 2, 3, 4]),
        # Of what top-k leaves, 0.3 and one of 0.2: 0.3 is 0.6 of them.
        ({"top_k": 2, "top_p": 0.59}, [1]),
        ({"top_k": 2, "top_p": 0.61}, [0, 1, 2, 4]),
        ({"min_p": 0.5}, [0, 1, 2, 4]),
        ({"min_p": 0.7}, [1]),
    ],
)
def test_thresholds(filters: dict[str, float], kept: list[int], device: str) -> None:
    row = torch.tensor([0.2, 0.3, 0.2, 0.1, 0.2])
    share = row[kept] / row[kept].sum()
    middle = (share.cumsum(0) - share / 2).numpy()
    # Steps whose random numbers are in the middle of each token's part.
    stream = uniforms(np.full(2000, 5, np.uint64), np.arange(2000, dtype=np.int32))
    counts = np.abs(stream - middle[:, None]).argmin(axis=1).tolist()
    samplings = [RowSampling(seed=5, temperature=1.0, **filters) for _ in kept]
    tokens, _, expected = run(row.log().repeat(len(kept), 1), samplings, counts, device)
    assert tokens == expected == kept


@triton.jit
def _uniforms(state, counts, out, STRIDE: tl.constexpr):
    b = tl.program_id(0)
    tl.store(out + b, sample._uniform(state + b * STRIDE, tl.load(counts + b)))


def test_uniforms(device: str) -> None:
    generator = np.random.default_rng(0)
    seeds = np.array([0, 1, 2**63, 2**64 - 1, *generator.integers(0, 2**64, 20, dtype=np.uint64)], np.uint64)
    counts = np.array([0, 2**31 - 1, 1, 0, *generator.integers(0, 2**31, 20)], np.int32)
    state = SamplerState(len(seeds), 0, 1, device)
    for row, seed in enumerate(seeds.tolist()):
        state.admit([RowSampling(seed=seed, row=row)])
    out = torch.full((len(seeds),), torch.nan, dtype=torch.float64, device=device)
    _uniforms[(len(seeds),)](state.data, torch.from_numpy(counts).to(device), out, STRIDE=state.data.shape[1])
    assert (out.cpu().numpy() == uniforms(seeds, counts)).all()


def test_too_many_bans(device: str) -> None:
    with pytest.raises(ValueError, match="4 banned tokens are more than 3"):
        SamplerState(2, 3, 9, device).admit([RowSampling(seed=0, row=1, banned=(1, 2, 3, 4))])
