"""The distribution that is drawn from, exactly: rows with the same logits and numbers evenly spread over [0, 1).

Each token's share of the numbers is its probability, to within one number. The reference is `transformers`' own
processors in the order in which its `generate` has them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation import logits_process

import aphoton.sampling.sampler
from aphoton.sampling import RowSampling
from aphoton.sampling.sampler import CANDIDATES, Sampler, uniforms

ROWS = 1024
RUNS = 4
SPREAD = ROWS * RUNS
"""Numbers that are spread over [0, 1)."""


def logits_of(vocab: int, spread: float, seed: int) -> Tensor:
    """Distinct values: where two are equal, which of them a filter keeps is a matter of taste."""
    values = torch.linspace(-1, 1, vocab) ** 3 * 3 * spread
    return values[torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))]


def theirs(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[V] probabilities."""
    processors = logits_process.LogitsProcessorList([logits_process.TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(logits_process.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(logits_process.TopPLogitsWarper(top_p))
    if min_p:
        processors.append(logits_process.MinPLogitsWarper(min_p))
    scores = processors(torch.zeros(1, 1, dtype=torch.int64), logits[None].double().clone())
    return scores[0].softmax(dim=0)


def draw(patch: pytest.MonkeyPatch, logits: Tensor, **sampling: Any) -> Tensor:
    """[V] how often each token comes when the random numbers are spread evenly."""
    counts = torch.zeros(len(logits), dtype=torch.int64)
    sampler = Sampler(max_rows=ROWS)
    rows = np.arange(1, ROWS + 1, dtype=np.int32)
    for row in rows.tolist():
        sampler.admit(RowSampling(seed=row, row=row, **sampling))
    for run in range(RUNS):

        def spread(seeds: NDArray[np.uint64], counters: NDArray[np.int32], run: int = run) -> NDArray[np.float64]:
            return (np.arange(len(seeds)) * RUNS + run + 0.5) / SPREAD

        patch.setattr(aphoton.sampling.sampler, "uniforms", spread)
        sampled = sampler.sample(logits.repeat(ROWS, 1), rows, np.zeros(ROWS, np.int32))
        assert sampled.finite.all()
        counts += torch.bincount(sampled.tokens, minlength=len(logits))
    return counts


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-9},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.3},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.1},
    {"top_k": CANDIDATES + 100, "top_p": 0.9},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(
    ("vocab", "spread", "temperature"),
    [(60, 2.0, 1.0), (60, 0.5, 0.3), (60, 1.0, 20.0), (CANDIDATES + 500, 4.0, 1.0), (CANDIDATES + 500, 0.05, 1.5)],
)
def test_tokens_have_the_shares_that_transformers_gives_them(
    vocab: int, spread: float, temperature: float, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(vocab, spread, seed=vocab)
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    expected = theirs(logits, temperature, **options)
    shares = draw(monkeypatch, logits, temperature=temperature, **options).double() / SPREAD
    assert (shares - expected).abs().max() <= 1.01 / SPREAD
    assert not shares[expected == 0].any(), "what the filters drop never comes"


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
def test_looking_at_the_likeliest_only_changes_nothing(
    filters: dict[str, Any], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates first, or the whole vocabulary at once: the same tokens from the same seeds."""
    vocab, count = CANDIDATES + 900, 64
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, vocab, generator=generator) * spread
    sampler = Sampler(max_rows=count)
    rows = np.arange(1, count + 1, dtype=np.int32)
    for row in rows.tolist():
        sampler.admit(RowSampling(seed=row, row=row, temperature=1.0, **{**filters, "top_k": filters.get("top_k", 0)}))
    candidates = sampler.sample(logits.clone(), rows, rows).tokens
    monkeypatch.setattr(aphoton.sampling.sampler, "CANDIDATES", vocab)
    whole = sampler.sample(logits.clone(), rows, rows).tokens
    assert candidates.tolist() == whole.tolist()


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_the_ends_of_the_unit_interval_fall_on_tokens_that_can_be(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 and the largest number below 1, with the first and the last tokens impossible."""
    logits = torch.zeros(1, 50)
    logits[0, :10] = logits[0, 40:] = -torch.inf
    sampler = Sampler(max_rows=1)
    sampler.admit(RowSampling(seed=0, row=1, temperature=1.0, **filters))
    for number in (0.0, 1.0 - 2.0**-53):
        monkeypatch.setattr(aphoton.sampling.sampler, "uniforms", lambda *_, number=number: np.array([number]))
        token = int(sampler.sample(logits.clone(), np.array([1], np.int32), np.array([0], np.int32)).tokens[0])
        assert 10 <= token < 40


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-37, 1e-38, 1e-44, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, -1e4])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=str)
def test_the_lower_the_temperature_the_nearer_to_greedy(
    temperature: float, scale: float, filters: dict[str, Any]
) -> None:
    """However low: nothing overflows."""
    logits = logits_of(100, 1.0, seed=1)[None] + scale
    sampler = Sampler(max_rows=1)
    for seed in range(20):
        sampler.admit(RowSampling(seed=seed, row=1, temperature=temperature, **filters))
        sampled = sampler.sample(logits.clone(), np.array([1], np.int32), np.array([0], np.int32))
        assert sampled.tokens.tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("vocab", [50, CANDIDATES + 500])
def test_a_row_draws_the_same_in_every_company(vocab: int) -> None:
    """Rows of every kind; the whole batch, any part of it, in any order."""
    rng = np.random.default_rng(1)
    count = 40
    kinds: list[dict[str, Any]] = [{**filters, "temperature": t} for filters in FILTERS for t in (0.0, 0.7, 1.5)]
    sampler = Sampler(max_rows=count)
    for row in range(1, count + 1):
        kind = {"logprobs": row % 4 if row % 3 else None, "min_tokens": 5, "banned": (1, 2, row), **kinds[row]}
        sampler.admit(RowSampling(seed=int(rng.integers(2**63)), row=row, **kind))
    logits = torch.randn(count + 1, vocab, generator=torch.Generator().manual_seed(2))
    counts = rng.integers(0, 9, count + 1).astype(np.int32)

    def sample(rows: NDArray[np.int32]) -> list[int]:
        index = torch.from_numpy(rows.astype(np.int64))
        tokens: list[int] = sampler.sample(logits[index].clone(), rows, counts[rows]).tokens.tolist()
        return tokens

    alone = {row: sample(np.array([row], np.int32))[0] for row in range(1, count + 1)}
    for _ in range(30):
        rows = rng.permutation(np.arange(1, count + 1))[: rng.integers(1, count + 1)].astype(np.int32)
        assert sample(rows) == [alone[row] for row in rows.tolist()]


def test_a_row_that_is_admitted_again_has_nothing_of_the_one_before() -> None:
    sampler = Sampler(max_rows=2)
    logits = logits_of(50, 1.0, seed=4)[None]
    row, count = np.array([1], np.int32), np.array([0], np.int32)
    best = int(logits.argmax())
    sampler.admit(
        RowSampling(
            seed=1, row=1, temperature=9.0, top_k=3, top_p=0.5, min_p=0.1, min_tokens=9, banned=(best,), logprobs=5
        )
    )
    before = sampler.sample(logits.clone(), row, count)
    assert before.top_ids is not None and int(before.tokens[0]) != best
    sampler.admit(RowSampling(seed=2, row=1))
    after = sampler.sample(logits.clone(), row, count)
    assert after.tokens.tolist() == [best]
    assert after.logprobs is None and after.top_ids is None


def test_more_alternatives_than_tokens() -> None:
    sampler = Sampler(max_rows=1)
    sampler.admit(RowSampling(seed=1, row=1, logprobs=64))
    sampled = sampler.sample(torch.randn(1, 10), np.array([1], np.int32), np.array([0], np.int32))
    assert sampled.top_ids is not None and sampled.top_ids.shape == (1, 10)


# The random streams


def splitmix(seed: int, count: int) -> float:
    """SplitMix64 in plain integers: the stream that begins at the mixed seed."""
    most = 2**64 - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & most
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & most
        return value ^ (value >> 31)

    golden = 0x9E3779B97F4A7C15
    return (mix((mix((seed + golden) & most) + (count + 1) * golden) & most) >> 11) / 2**53


def test_numbers_are_those_of_splitmix64() -> None:
    seeds = [0, 1, 2, 12345, 2**32, 2**63, 2**64 - 1]
    counts = [0, 1, 2, 1000, 2**31 - 1]
    pairs = [(seed, count) for seed in seeds for count in counts]
    numbers = uniforms(np.array([s for s, _ in pairs], np.uint64), np.array([c for _, c in pairs], np.int32))
    assert numbers.tolist() == [splitmix(*pair) for pair in pairs]
    # The first number of the seed 1234567, as other implementations print it for the generator itself.
    assert mixed_once(1234567) == 6457827717110365317


def mixed_once(seed: int) -> int:
    """The generator's first output for ``seed``, by the function under test."""
    from aphoton.sampling.sampler import _mix

    with np.errstate(over="ignore"):
        return int(_mix(np.array([seed], np.uint64) + np.uint64(0x9E3779B97F4A7C15))[0])


def chi_square(numbers: NDArray[np.float64], bins: int) -> float:
    counts = np.bincount((numbers * bins).astype(np.int64), minlength=bins)
    mean = len(numbers) / bins
    return float(((counts - mean) ** 2 / mean).sum())


@pytest.mark.parametrize(
    "stream",
    [
        lambda n: uniforms(np.full(n, 7, np.uint64), np.arange(n, dtype=np.int32)),  # one seed, all its tokens
        lambda n: uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int32)),  # neighbouring seeds, one token
        lambda n: uniforms(np.arange(n, dtype=np.uint64) << np.uint64(40), np.full(n, 3, np.int32)),
        lambda n: uniforms(np.arange(n, dtype=np.uint64), np.arange(n, dtype=np.int32)[::-1].copy()),  # diagonal
    ],
)
def test_numbers_are_even_in_every_direction(stream: Callable[[int], NDArray[np.float64]]) -> None:
    """And so are pairs of neighbours. The numbers are fixed; the bounds are four sigma of chi-square."""
    numbers = stream(64_000)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(chi_square(numbers, 256) - 255) < 4 * (2 * 255) ** 0.5
    pairs = np.floor(numbers[:-1] * 16) / 16 + numbers[1:] / 16
    assert abs(chi_square(pairs, 256) - 255) < 4 * (2 * 255) ** 0.5
