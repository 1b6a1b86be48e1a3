"""What changes a row's logits, against the definitions written out token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from aphoton.sampling import RowSampling, mask_words
from aphoton.sampling.sampler import Sampler

VOCAB, ROWS, STEPS = 45, 4, 3
ids = st.integers(0, VOCAB - 1)
Floats = NDArray[np.float32]


@dataclass
class Row:
    """A row, and what is asked of it late in each step: the ids of a mask, and whether a processor comes."""

    sampling: RowSampling
    masks: list[frozenset[int] | None]
    processed: list[bool]
    output: list[int] = field(default_factory=list)


def processor(output: Sequence[int], logits: Tensor) -> None:
    """Something that depends on all that it is given."""
    logits[sum(output) % VOCAB] += 2.5


def adjusted(logits: Floats, row: Row, step: int) -> Floats:
    """By the definitions, in their order; float32 all along."""
    sampling, one = row.sampling, np.float32
    output = [*sampling.output, *row.output]
    changed = logits.copy()
    for token, value in sampling.bias:
        changed[token] += one(value)
    for token in range(VOCAB):
        times = output.count(token)
        if times or token in sampling.prompt.tolist():
            penalty = one(sampling.repetition_penalty)
            changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
        if times:
            subtracted = one(times) * one(sampling.frequency_penalty) + one(sampling.presence_penalty)
            changed[token] -= subtracted
    if row.processed[step]:
        processor(row.output, torch.from_numpy(changed))
    mask = row.masks[step]
    for token in range(VOCAB):
        allowed = mask if mask is not None else sampling.allowed
        banned = sampling.banned if len(row.output) < sampling.min_tokens else ()
        if (allowed is not None and token not in allowed) or token in banned:
            changed[token] = -np.inf
    return changed


def packed(masks: Sequence[frozenset[int]]) -> NDArray[np.uint32]:
    words = np.zeros((len(masks), mask_words(VOCAB)), np.uint32)
    for line, mask in zip(words, masks, strict=True):
        for token in mask:
            line[token // 32] |= np.uint32(1 << token % 32)
    return words


some = st.sets(ids, min_size=3).map(frozenset)
samplings = st.builds(
    RowSampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 0, 5]),
    min_tokens=st.integers(0, 2),
    banned=st.sets(ids, max_size=2).map(tuple),
    logprobs=st.sampled_from([None, None, 0, 3]),
    bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 0.25, 4.0]), max_size=5).map(lambda d: tuple(d.items())),
    allowed=st.none() | st.none() | some.map(tuple),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.25, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.75, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    prompt=st.lists(ids, max_size=6).map(lambda values: np.array(values, np.int32)),
    output=st.lists(ids, max_size=6).map(tuple),
)
rows = st.builds(
    Row,
    samplings,
    st.lists(st.none() | some, min_size=STEPS, max_size=STEPS),
    st.lists(st.booleans(), min_size=STEPS, max_size=STEPS),
)


def sample(sampler: Sampler, logits: Tensor, crowd: list[Row], step: int) -> Any:
    masked = [index for index, row in enumerate(crowd) if row.masks[step] is not None]
    return sampler.sample(
        logits.clone(),
        np.array([row.sampling.row for row in crowd], np.int32),
        np.array([len(row.output) for row in crowd], np.int32),
        masked=np.array(masked, np.int32),
        masks=packed([row.masks[step] or frozenset() for row in crowd if row.masks[step] is not None]),
        processors=[(i, processor, row.output[:]) for i, row in enumerate(crowd) if row.processed[step]],
    )


def as_the_engine_does(sampling: RowSampling) -> RowSampling:
    """The prompt is sent with a repetition penalty only."""
    return sampling if sampling.repetition_penalty != 1.0 else replace(sampling, prompt=np.zeros(0, np.int32))


@settings(max_examples=120)
@given(st.lists(rows, min_size=1, max_size=ROWS), st.integers(0, 10_000))
def test_as_defined(crowd: list[Row], seed: int) -> None:
    """Several steps, as penalties remember: the tokens that a sampler without rules takes from adjusted logits."""
    sampler, plain = Sampler(max_rows=ROWS), Sampler(max_rows=ROWS)
    for number, row in enumerate(crowd, 1):
        row.output = []
        row.sampling = replace(as_the_engine_does(row.sampling), row=number)
        sampler.admit(row.sampling)
        filters = {name: getattr(row.sampling, name) for name in ("seed", "row", "temperature", "top_k")}
        plain.admit(RowSampling(**filters))
    for step in range(STEPS):
        logits = torch.randn(len(crowd), VOCAB, generator=torch.Generator().manual_seed(seed + step)) * 2
        sampled = sample(sampler, logits, crowd, step)
        expected = np.stack([adjusted(line.numpy(), row, step) for line, row in zip(logits, crowd, strict=True)])
        counts = np.array([len(row.output) for row in crowd], np.int32)
        numbers = np.array([row.sampling.row for row in crowd], np.int32)
        assert sampled.tokens.tolist() == plain.sample(torch.from_numpy(expected), numbers, counts).tokens.tolist()
        assert sampled.finite.all() and not sampled.errors
        if any(row.sampling.logprobs is not None for row in crowd):
            raw = logits.log_softmax(1).gather(1, sampled.tokens[:, None])[:, 0]
            assert sampled.logprobs.tolist() == pytest.approx(raw.tolist(), abs=1e-5)
        for row, token in zip(crowd, sampled.tokens.tolist(), strict=True):
            row.output.append(token)


@settings(max_examples=40)
@given(st.lists(rows, min_size=2, max_size=ROWS), st.integers(0, 10_000))
def test_a_row_is_its_own(crowd: list[Row], seed: int) -> None:
    """Alone, or among others with other rules."""
    logits = torch.randn(STEPS, len(crowd), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2

    def run(chosen: list[int]) -> dict[int, list[int]]:
        sampler = Sampler(max_rows=ROWS)
        taken = [replace(crowd[i], sampling=replace(crowd[i].sampling, row=i + 1), output=[]) for i in chosen]
        for row in taken:
            sampler.admit(row.sampling)
        for step in range(STEPS):
            tokens = sample(sampler, logits[step, chosen], taken, step).tokens.tolist()
            for row, token in zip(taken, tokens, strict=True):
                row.output.append(token)
        return {i: row.output for i, row in zip(chosen, taken, strict=True)}

    together = run(list(range(len(crowd))))
    assert run(list(reversed(range(len(crowd))))) == together
    for i in range(len(crowd)):
        assert run([i])[i] == together[i]


def test_a_row_that_is_given_away_has_nothing_of_the_one_before() -> None:
    logits = torch.linspace(3, 0, VOCAB).repeat(1, 1)
    row, count = np.array([1], np.int32), np.array([0], np.int32)
    sampler = Sampler(max_rows=1)
    strict = {"bias": ((0, -100.0),), "allowed": (0, 1, 2, 3), "frequency_penalty": 50.0, "row": 1}
    sampler.admit(RowSampling(seed=0, output=(1,), **strict))  # type: ignore[arg-type]
    assert [int(sampler.sample(logits.clone(), row, count).tokens[0]) for _ in range(3)] == [2, 3, 1]
    sampler.admit(RowSampling(seed=0, **strict))  # type: ignore[arg-type]
    assert [int(sampler.sample(logits.clone(), row, count).tokens[0]) for _ in range(3)] == [1, 2, 3]
    sampler.admit(RowSampling(seed=0, row=1))
    assert [int(sampler.sample(logits.clone(), row, count).tokens[0]) for _ in range(3)] == [0, 0, 0]


def test_penalties_of_more_tokens_than_there_was_room_for() -> None:
    """Each token once, from the likeliest on."""
    logits = torch.linspace(3, 0, 500).repeat(1, 1)
    sampler = Sampler(max_rows=1)
    sampler.admit(RowSampling(seed=0, row=1, presence_penalty=9.0, output=(0, 1)))
    row = np.array([1], np.int32)
    tokens = [int(sampler.sample(logits.clone(), row, np.array([i], np.int32)).tokens[0]) for i in range(300)]
    assert tokens == list(range(2, 302))


def test_a_processor_that_fails_is_its_rows_alone() -> None:
    def fail(output: Sequence[int], logits: Tensor) -> None:
        raise KeyError("no such state")

    def prefer(output: Sequence[int], logits: Tensor) -> None:
        logits[7] = 50.0

    sampler = Sampler(max_rows=3)
    for number in (1, 2, 3):
        sampler.admit(RowSampling(seed=0, row=number))
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 1.0
    numbers = np.array([1, 2, 3], np.int32)
    sampled = sampler.sample(logits, numbers, 0 * numbers, processors=[(1, fail, []), (2, prefer, [])])
    assert list(sampled.errors) == [1] and isinstance(sampled.errors[1], KeyError)
    assert sampled.tokens[[0, 2]].tolist() == [4, 7]


def test_a_mask_that_allows_nothing_is_told() -> None:
    sampler = Sampler(max_rows=2)
    for number in (1, 2):
        sampler.admit(RowSampling(seed=0, row=number, temperature=1.0))
    numbers = np.array([1, 2], np.int32)
    masks = packed([frozenset()])
    sampled = sampler.sample(torch.zeros(2, VOCAB), numbers, 0 * numbers, masked=numbers[:1], masks=masks)
    assert sampled.finite.all() and sampled.barred.tolist() == [False, True]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_whose_doing_it_is_that_nothing_is_finite(value: float) -> None:
    """The model's, or what the row asks for: rows without a fault, and with one under a processor, a mask and a ban."""
    sampler = Sampler(max_rows=4)
    sampler.admit(RowSampling(seed=0, row=1))
    sampler.admit(RowSampling(seed=0, row=2))
    sampler.admit(RowSampling(seed=0, row=3, min_tokens=1, banned=(5,)))
    sampler.admit(RowSampling(seed=0, row=4, allowed=(7,)))

    def spoil(output: Sequence[int], logits: Tensor) -> None:
        logits.fill_(value)

    numbers = np.array([1, 2, 3, 4], np.int32)
    for fault in (False, True):
        logits = torch.full((4, VOCAB), value) if fault else torch.zeros(4, VOCAB)
        masks = packed([frozenset({5})])
        sampled = sampler.sample(
            logits, numbers, 0 * numbers, masked=np.array([2], np.int32), masks=masks, processors=[(1, spoil, [])]
        )
        assert sampled.finite.tolist() == [not fault] * 4
        assert sampled.barred.tolist() == [False, not fault, not fault, False]
