"""Bias, penalties, masks and processors on the device, against the sampler on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from aphoton.sampling import mask_words
from aphoton.sampling.row import MAX_BIAS, RowSampling
from aphoton.sampling.sampler import Sampler

rules = pytest.importorskip("aphoton.kernels.triton.rules", reason="triton is not installed")
sample = pytest.importorskip("aphoton.kernels.triton.sample")
SamplerState = pytest.importorskip("aphoton.kernels.triton.sampler_state").SamplerState

# Of the interpreter, whose numpy says what infinite logits and small numbers do; it is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROWS = 6
PLACES = [4, 0, 2]
"""Batch entries of three rows in a batch of five: the others are somebody else's."""


class Both:
    """Rows on either sampler."""

    def __init__(self, samplings: Sequence[RowSampling], vocab: int, device: str) -> None:
        self.device, self.vocab = device, vocab
        self.state = SamplerState(ROWS, 3, vocab, device)
        self.sampler = Sampler(max_rows=ROWS)
        self.rows = np.arange(ROWS, ROWS - len(samplings), -1, dtype=np.int32)
        for row, sampling in zip(self.rows.tolist(), samplings, strict=True):
            self.admit(replace(sampling, row=row))

    def admit(self, sampling: RowSampling) -> None:
        self.state.admit([sampling])
        self.sampler.admit(sampling)

    def step(
        self,
        logits: Tensor,
        count: int = 0,
        masks: dict[int, list[int]] | None = None,
        processors: Sequence[Any] = (),
    ) -> tuple[list[int], list[int], list[int]]:
        """Tokens and finite of the kernels, and tokens of the CPU.

        :param masks: by row's index, the tokens that it may have.
        """
        masks = masks or {}
        many = len(self.rows)
        places = PLACES[:many]
        counts = np.full(many, count, np.int32)
        words = np.zeros((len(masks), mask_words(self.vocab)), np.uint32)
        for line, tokens in zip(words, masks.values(), strict=True):
            np.bitwise_or.at(line, np.array(tokens) // 32, np.uint32(1) << (np.array(tokens) % 32).astype(np.uint32))
        which = np.full(many, -1, np.int32)
        which[list(masks)] = range(len(masks))

        batch = torch.full((5, self.vocab), torch.nan, dtype=logits.dtype)
        batch[places] = logits
        batch = batch.to(self.device)
        given = [self._tensor(np.array(places, np.int32)), self._tensor(self.rows), self._tensor(counts)]
        masked = [self._tensor(which), self._tensor(words.view(np.int32))] if masks else [None, None]
        last, tokens, finite = (torch.full((size,), -7, dtype=torch.int32, device=self.device) for size in (7, 5, 5))
        finite[places] = logits.float().max(dim=1).values.isfinite().int().to(self.device)  # as `argmax` leaves it
        rules.adjust(batch, *given, *masked, self.state, many=many, hard=not processors)
        for index, processor, output in processors:
            processor(output, self.state.adjusted[index])
        if processors:
            rules.adjust(batch, *given, *masked, self.state, many=many, soft=False)
        sample.sample_ruled(*given, self.state, last, tokens, finite, many=many)
        others = [place for place in range(5) if place not in places]
        assert (tokens[others] == -7).all() and (finite[others] == -7).all()
        assert torch.equal(last[self.rows.tolist()], tokens[places]) and (last[: 7 - many] == -7).all()

        expected = self.sampler.sample(
            logits.float().clone(),
            self.rows,
            counts,
            masked=np.array(list(masks), np.int32),
            masks=words,
            processors=processors,
        )
        assert finite[places].tolist() == (expected.finite.int() - 2 * expected.barred.int()).tolist()
        return tokens[places].tolist(), finite[places].tolist(), expected.tokens.tolist()

    def _tensor(self, values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def random_logits(batch: int, vocab: int, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def random_row(source: np.random.Generator, vocab: int) -> RowSampling:
    def pick(*values: Any) -> Any:
        return values[source.integers(len(values))]

    def tokens(many: int) -> list[int]:
        return source.integers(0, vocab, many).tolist()

    return RowSampling(
        seed=int(source.integers(0, 2**63)),
        temperature=pick(0.0, 0.7, 1.4),
        top_k=pick(0, 30),
        top_p=pick(1.0, 0.9),
        min_tokens=pick(0, 2),
        banned=tuple(tokens(3)),
        bias=tuple((token, float(source.normal() * 3)) for token in set(tokens(pick(0, 1, 40)))),
        allowed=pick(None, None, tuple(set(tokens(vocab // 3)))),
        presence_penalty=pick(0.0, 1.5),
        frequency_penalty=pick(0.0, 0.8, -0.4),
        repetition_penalty=pick(1.0, 1.3),
        prompt=np.array(tokens(20), np.int32),
        output=tuple(tokens(pick(0, 12))),
    )


def shift(output: Sequence[int], logits: Tensor) -> None:
    logits += torch.linspace(0, 1 + len(output), len(logits), device=logits.device)


@pytest.mark.parametrize(("vocab", "seed"), [(97, 0), (97, 1), (97, 2), (97, 3), (2048, 4), (5003, 5), (5003, 6)])
def test_as_the_cpu(vocab: int, seed: int, device: str) -> None:
    """Steps of random rows, with masks and processors here and there: rounding could show, but not in these seeds."""
    source = np.random.default_rng(seed)
    rows = [random_row(source, vocab) for _ in range(3)]
    both = Both([replace(r, prompt=r.prompt[: 20 * (r.repetition_penalty != 1)]) for r in rows], vocab, device)
    for count in range(3):
        masks = {index: source.integers(0, vocab, vocab // 4).tolist() for index in range(3) if source.random() < 0.4}
        processors = [(index, shift, [0] * count) for index in range(3) if source.random() < 0.2]
        tokens, finite, expected = both.step(random_logits(3, vocab, seed + count), count, masks, processors)
        assert tokens == expected and finite == [1, 1, 1]


def test_counts_grow_by_what_is_chosen(device: str) -> None:
    """The same logits each time, in bfloat16: only the penalties change, and one token comes after the other."""
    logits = torch.linspace(8, 0, 97).repeat(2, 1).bfloat16()
    both = Both([RowSampling(seed=0, presence_penalty=20.0), RowSampling(seed=0, frequency_penalty=0.1)], 97, device)
    rows = [both.step(logits, count) for count in range(6)]
    assert all(tokens == expected for tokens, _, expected in rows)
    assert [tokens[0] for tokens, _, _ in rows] == list(range(6))
    assert both.state.seen[ROWS].cpu().tolist() == [1] * 6 + [0] * 91
    assert int(both.state.seen[ROWS - 1].sum()) == 6


def test_a_row_that_is_given_away_has_nothing_of_the_one_before(device: str) -> None:
    logits = torch.linspace(8, 0, 97).repeat(1, 1)
    everything: dict[str, Any] = {
        "bias": ((0, -50.0), (1, 2.0)),
        "allowed": (0, 1, 2),
        "repetition_penalty": 4.0,
        "presence_penalty": 3.0,
        "prompt": np.array([1, 2], np.int32),
        "row": ROWS,
    }
    both = Both([RowSampling(seed=0, **everything)], 97, device)
    before = both.step(logits)
    both.admit(RowSampling(seed=0, row=ROWS))
    assert both.step(logits)[0] == both.step(logits)[0] == [0]
    both.admit(RowSampling(seed=0, output=(7, 0, 0), presence_penalty=30.0, row=ROWS))
    assert [both.step(logits)[0][0] for _ in range(7)] == [1, 2, 3, 4, 5, 6, 8]
    both.admit(RowSampling(seed=0, **everything))
    assert both.step(logits) == before


@pytest.mark.parametrize("first", [0, 1500, 3979])
def test_as_many_bias_entries_as_there_may_be(first: int, device: str) -> None:
    """In one block, over two, and up to the end of the vocabulary."""
    logits = random_logits(1, 5003, seed=first)
    bias = tuple((first + i, float(-i % 7)) for i in reversed(range(MAX_BIAS)))
    tokens, _, expected = Both([RowSampling(seed=0, bias=bias)], 5003, device).step(logits)
    plain = logits[0].clone()
    for token, value in bias:
        plain[token] += value
    assert tokens == expected == [int(plain.argmax())]


def test_too_many_bias_entries(device: str) -> None:
    bias = tuple((token, 1.0) for token in range(MAX_BIAS + 1))
    with pytest.raises(ValueError, match="1025 bias entries are more than 1024"):
        SamplerState(2, 3, 5003, device).admit([RowSampling(seed=0, row=1, bias=bias)])


def test_what_is_not_finite(device: str) -> None:
    logits = random_logits(3, 5003, seed=1)
    logits[0, 4000] = torch.nan
    logits[1, 100] = torch.nan
    for temperature in (0.0, 1.0):
        both = Both([RowSampling(seed=0, temperature=temperature) for _ in range(3)], 5003, device)
        masks = {0: [1, 2, 4000], 1: [*range(99), 5002], 2: []}
        tokens, finite, _ = both.step(logits, masks={k: v for k, v in masks.items() if v})
        assert finite == [0, 0, 1], "whether the mask allows the one that is not, or not"
        assert all(0 <= token < 5003 for token in tokens) and tokens[1] in masks[1]
    # A mask without a bit: words of zeros.
    both = Both([RowSampling(seed=0, allowed=())], 97, device)
    tokens, finite, _ = both.step(random_logits(1, 97, seed=2))
    assert finite == [-1] and 0 <= tokens[0] < 97


def test_nothing_is_done_for_padding(device: str) -> None:
    """Row 0, as in graphs of more rows than there are: its place may be anybody's."""
    logits = torch.zeros(3, 40, device=device)
    state = SamplerState(3, 4, 40, device)
    places, rows = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([2, 0, 0], [1, 0, 0]))
    masks = torch.zeros(3, state.mask_words, dtype=torch.int32, device=device)
    masks[0, 1] = 1 << 6  # token 38
    masked = torch.tensor([0, 0, 0], dtype=torch.int32, device=device)
    last, tokens, finite = (torch.full((size,), 9, dtype=torch.int32, device=device) for size in (4, 3, 3))
    rules.adjust(logits, places, rows, torch.zeros_like(rows), masked, masks, state, many=3)
    sample.sample_ruled(places, rows, torch.zeros_like(rows), state, last, tokens, finite, many=3)
    assert tokens.tolist() == [9, 9, 38] and last.tolist() == [9, 38, 9, 9] and finite.tolist() == [9, 9, 1]
