"""`Sampler` against plain references, and what its random streams promise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from aphoton.sampling import RowSampling
from aphoton.sampling.sampler import CANDIDATES, Sampler, uniforms

ROWS = 8


def sampler(*rows: RowSampling) -> Sampler:
    made = Sampler(max_rows=ROWS)
    for row, sampling in enumerate(rows, 1):
        sampling.row = row
        made.admit(sampling)
    return made


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def kept(logits: Tensor, sampling: RowSampling) -> set[int]:
    """The tokens that the filters leave, by the definitions: temperature, top-k, top-p of what is left, min-p."""
    probabilities = (logits.double() / sampling.temperature).softmax(0)
    order = probabilities.argsort(descending=True).tolist()
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass = float(probabilities[order].sum())
    left, before = [], 0.0
    for token in order:
        if before >= sampling.top_p * mass and sampling.top_p < 1:
            break
        left.append(token)
        before += float(probabilities[token])
    best = float(probabilities[order[0]])
    return {token for token in left if float(probabilities[token]) >= sampling.min_p * best}


filters = st.builds(
    RowSampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 1000, CANDIDATES + 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
)


@settings(max_examples=150)
@given(filters, st.integers(0, 10_000), st.sampled_from([7, 300, CANDIDATES + 700]), st.sampled_from([0.05, 1.0, 4.0]))
def test_a_draw_is_among_what_the_filters_leave(sampling: RowSampling, seed: int, vocab: int, spread: float) -> None:
    """Also where the candidates looked at first do not reach: a flat distribution over more tokens than those."""
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    allowed = kept(logits[0], sampling)
    made = sampler(sampling)
    for count in range(5):
        token = int(made.sample(logits.clone(), ints(1), ints(count)).tokens[0])
        if token not in allowed:  # float32 against float64 at the very edge of a filter
            edge = min(float(logits[0, other]) for other in allowed)
            assert float(logits[0, token]) == pytest.approx(edge, abs=0.02 * spread)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    """Chi-square over 20,000 draws from fixed seeds: the same draws every time."""
    vocab, draws = 12, 20_000
    logits = torch.linspace(2.0, -2.0, vocab)
    sampling = RowSampling(seed=5, temperature=1.3, **options)  # type: ignore[arg-type]
    made = sampler(sampling)
    counts = np.zeros(vocab)
    for begin in range(0, draws, 1000):  # one row's stream, many places of it at once
        tokens = made.sample(
            logits.repeat(1000, 1), np.ones(1000, np.int32), np.arange(begin, begin + 1000, dtype=np.int32)
        )
        counts += np.bincount(tokens.tokens.numpy(), minlength=vocab)
    allowed = sorted(kept(logits, sampling))
    weights = (logits.double() / 1.3).exp()[allowed].numpy()
    expected = draws * weights / weights.sum()
    assert counts.sum() == counts[allowed].sum() == draws
    chi_square = float(((counts[allowed] - expected) ** 2 / expected).sum())
    assert chi_square < 3 * len(allowed) + 12  # far beyond its 99.9th percentile; the draws are fixed


@settings(max_examples=60)
@given(st.lists(filters, min_size=2, max_size=ROWS), st.integers(0, 1000), st.booleans())
def test_a_row_draws_the_same_alone_and_in_any_company(rows: list[RowSampling], seed: int, greedy: bool) -> None:
    if greedy:
        rows[0].temperature = 0.0
    logits = torch.randn(len(rows), 500, generator=torch.Generator().manual_seed(seed))
    made = sampler(*rows)
    counts = np.arange(len(rows), dtype=np.int32) * 3
    ids = np.arange(1, len(rows) + 1, dtype=np.int32)
    together = made.sample(logits.clone(), ids, counts).tokens.tolist()
    backwards = made.sample(logits.flip(0), ids[::-1].copy(), counts[::-1].copy()).tokens.tolist()[::-1]
    alone = [
        int(made.sample(logits[i : i + 1].clone(), ids[i : i + 1], counts[i : i + 1]).tokens[0])
        for i in range(len(rows))
    ]
    assert together == backwards == alone


def test_greedy_takes_the_largest() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    sampled = sampler(*(RowSampling(seed=i) for i in range(3))).sample(logits.clone(), ints(1, 2, 3), ints(0, 0, 0))
    assert sampled.tokens.tolist() == logits.argmax(1).tolist()
    assert sampled.logprobs is None and sampled.top_ids is None


def test_banned_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(2, 10)
    logits[:, 3], logits[:, 4], logits[:, 5] = 9.0, 8.0, 7.0
    made = sampler(RowSampling(seed=1, min_tokens=2, banned=(3, 4)), RowSampling(seed=1, min_tokens=0, banned=(3, 4)))
    tokens = [made.sample(logits.clone(), ints(1, 2), ints(count, count)).tokens.tolist() for count in range(4)]
    assert tokens == [[5, 3], [5, 3], [3, 3], [3, 3]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_told_and_leaves_the_others_alone(value: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 3] = 30.0
    logits[1, 7] = value
    rows = [RowSampling(seed=1, temperature=temperature, top_p=0.9) for _ in range(3)]
    sampled = sampler(*rows).sample(logits, ints(1, 2, 3), ints(0, 0, 0))
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.tokens[[0, 2]].tolist() == [3, 3]


def test_logprobs_are_of_the_model_before_temperature_filters_and_bans() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    reference = logits.log_softmax(1)
    best = int(logits[0].argmax())
    made = sampler(
        RowSampling(seed=1, logprobs=5, min_tokens=9, banned=(best,)),
        RowSampling(seed=2, temperature=0.7, top_k=3, logprobs=0),
    )
    sampled = made.sample(logits.clone(), ints(1, 2), ints(0, 0))
    assert sampled.logprobs is not None and sampled.top_ids is not None and sampled.top_logprobs is not None
    assert int(sampled.tokens[0]) != best
    for row in range(2):
        assert float(sampled.logprobs[row]) == pytest.approx(float(reference[row, sampled.tokens[row]]), abs=1e-5)
    top = reference[0].topk(5)
    assert sampled.top_ids[0].tolist() == top.indices.tolist()
    assert sampled.top_logprobs[0].tolist() == pytest.approx(top.values.tolist(), abs=1e-5)


def test_random_streams_are_even_and_do_not_meet() -> None:
    many = 4096
    draws = [uniforms(np.full(many, seed, np.uint64), np.arange(many, dtype=np.int32)) for seed in (0, 1, 2, 2**64 - 1)]
    for draw in draws:
        assert draw.min() >= 0 and draw.max() < 1
        assert len(set(draw.tolist())) == many
        counts, _ = np.histogram(draw, bins=16, range=(0, 1))
        assert ((counts - many / 16) ** 2 / (many / 16)).sum() < 45  # 15 degrees of freedom, fixed draws
    assert len(set(np.concatenate(draws).tolist())) == 4 * many, "neighbouring seeds share no number"
    correlations = np.corrcoef(np.stack(draws))[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 0.06
