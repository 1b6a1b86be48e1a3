"""Chunks, rules, late rows and scored tokens: the stand-in for CUDA against the CPU, by the same launches."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import msgspec
from device.batches import batch
from device.cuda.standin import every_yield_is_a_turn, open_standin, stand_in, tiny
from device.driving import drive, serving

from aphoton import EngineConfig
from aphoton.device.base import PENDING, Batch, Late, Results, Scored
from aphoton.device.opening_cpu import open_cpu
from aphoton.models import RandomCheckpoint
from aphoton.models.random import SHAPES
from aphoton.sampling import RowSampling, mask_words

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # of the interpreter: random numbers overflow as meant
]

VOCAB = 300
SHAPE = msgspec.structs.replace(SHAPES["tiny"], num_layers=2, vocab_size=VOCAB)
SETTINGS: dict[str, Any] = {"max_rows": 4, "max_model_len": 24, "kv_pages": 17, "page_size": 4, "max_step_tokens": 9}
PAGES = [(row, index, 4 * (row - 1) + index + 1) for row in range(1, 5) for index in range(4)]
"""Four for each row, from the start."""
PROMPT = [11, 250, 3, 77, 140, 9, 31]


def late(masks: dict[int, Sequence[int]], processors: Sequence[Any] = ()) -> Late:
    """:param masks: by index in the batch, the tokens that may come."""
    words = np.zeros((len(masks), mask_words(VOCAB)), np.uint32)
    for line, tokens in zip(words, masks.values(), strict=True):
        for token in tokens:
            line[token // 32] |= np.uint32(1 << token % 32)
    return Late(masked=np.array(list(masks), np.int32), masks=words, processors=list(processors))


def prefer(output: Sequence[int], logits: Tensor) -> None:
    """Far above the rest, and another one after each token."""
    assert not isinstance(output, np.ndarray)
    logits[(100 + 7 * len(output)) % VOCAB] += 90.0


def fail(output: Sequence[int], logits: Tensor) -> None:
    raise LookupError("no such state")


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


PENALIZED = RowSampling(
    seed=5,
    row=1,
    temperature=0.9,
    repetition_penalty=1.4,
    frequency_penalty=0.7,
    bias=((4, 3.0), (290, 2.5)),
    prompt=ints(1, 2, 3),
    output=(9, 9, 40),
    logprobs=2,
)
CHUNKED = RowSampling(seed=6, row=2, presence_penalty=50.0, temperature=0.0)
ALLOWED = RowSampling(seed=7, row=3, allowed=(5, 50, 200, 299), logprobs=0)
AGAIN = RowSampling(seed=9, row=1, frequency_penalty=30.0, logprobs=0)
PLAIN = RowSampling(seed=8, row=4, temperature=1.2, top_k=40)


def steps() -> list[tuple[Batch, Late | None]]:
    """Rows 1 and 3 are late here and there, 2 in all steps but the first; 4 never is."""
    d = [PENDING]
    return [
        (
            batch(
                (1, 0, [1, 2, 3]),
                (2, 0, PROMPT[:3]),
                pages=PAGES,
                admitted=[PENALIZED, CHUNKED],
                partial=[2],
                scored=[Scored(index=1, targets=ints(*PROMPT[1:4]), top=2)],
            ),
            None,
        ),
        (
            batch(
                (1, 3, d),
                (2, 3, PROMPT[3:5]),
                (3, 0, [8]),
                admitted=[ALLOWED],
                partial=[2],
                late=[1],
                counts=[1, 0, 0],
                scored=[Scored(index=1, targets=ints(*PROMPT[5:6]), top=0)],
            ),
            late({0: range(0, VOCAB, 3)}),
        ),
        (
            batch(
                (1, 4, d),
                (2, 5, PROMPT[5:]),
                (3, 1, d),
                (4, 0, [6, 6]),
                admitted=[PLAIN],
                late=[2],
                counts=[2, 0, 1, 0],
            ),
            late({1: range(100)}),
        ),
        (
            batch((1, 5, d), (2, 7, d), (3, 2, d), (4, 2, d), late=[1, 2, 3], counts=[3, 1, 2, 1]),
            # The allowed ids are of no account where there is a mask, and are where there is a processor only.
            late({0: range(50, 60), 1: range(100)}, [(2, prefer, []), (0, prefer, [1])]),
        ),
        (
            batch((2, 8, d), (3, 3, d), (1, 6, d), late=[2, 3], counts=[2, 3, 4]),
            late({1: [7, 8], 0: range(100)}, [(0, fail, [])]),
        ),
        (batch((1, 7, d), (2, 9, d), (3, 4, d), late=[2, 3], counts=[5, 3, 4]), late({1: range(100)})),  # 3 has ended
        (batch((1, 8, d), (2, 10, d), late=[1, 2], counts=[6, 4]), None),  # all have
        # Rows 1 and 3 are somebody else's by now.
        (
            batch((3, 0, [5, 6]), (1, 0, [1]), admitted=[RowSampling(seed=1, row=3), AGAIN], late=[3]),
            late({0: [299]}),
        ),
        (batch((3, 2, d), (1, 1, d)), None),
    ]


MEANT = [[0], [0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2], [0, 1], [], [0, 1], [0, 1]]
"""Of each step, the rows whose results mean something: chunks have none, nor have late rows that end meanwhile."""


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{**SETTINGS, **settings})


async def on_the_cpu(kernels: str = "torch", **settings: Any) -> list[Results]:
    source = tiny(RandomCheckpoint(SHAPE), 24)
    device = open_cpu(source, config(dtype="float32", kernels=kernels, **settings))
    async with serving(device):
        return await drive(device, steps())


@pytest.fixture(scope="module")
def expected() -> list[Results]:
    return asyncio.run(on_the_cpu())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    from aphoton.device.cuda import device

    stand_in(monkeypatch)
    monkeypatch.setattr(device, "buckets", lambda max_rows: [max_rows])
    monkeypatch.setattr(device, "token_buckets", lambda most: [4, 8])
    return monkeypatch


def asking() -> Iterator[list[int]]:
    """Of each step, the rows that ask for log-probabilities."""
    wanted: dict[int, int | None] = {}
    for step, _ in steps():
        wanted |= {sampling.row: sampling.logprobs for sampling in step.admitted}
        yield [index for index, row in enumerate(step.rows.tolist()) if wanted[row] is not None]


def same(found: list[Results], expected: list[Results]) -> None:
    assert len(found) == len(expected) == len(MEANT)
    for ours, theirs, meant, ask in zip(found, expected, MEANT, asking(), strict=True):
        assert ours.faulty is None or not ours.faulty[meant].any()
        assert ours.tokens[meant].tolist() == theirs.tokens[meant].tolist()
        assert [(index, str(error)) for index, error in ours.errors.items()] == [
            (index, str(error)) for index, error in theirs.errors.items()
        ]
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            reported = sorted({*meant} & {*ask})
            assert ours.logprobs[reported].tolist() == pytest.approx(theirs.logprobs[reported].tolist(), abs=1e-4)
            assert (ours.top_ids is None) == (theirs.top_ids is None)
            if ours.top_ids is not None and theirs.top_ids is not None:
                assert ours.top_ids[reported].tolist() == theirs.top_ids[reported].tolist()
                assert ours.top_ids.dtype == np.int32
                assert ours.top_logprobs is not None and theirs.top_logprobs is not None
                assert ours.top_logprobs[reported] == pytest.approx(theirs.top_logprobs[reported], abs=1e-4)
        for one, other in zip(ours.scores, theirs.scores, strict=True):
            assert one.index == other.index
            assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-4)
            assert one.top_ids.tolist() == other.top_ids.tolist() and one.top_ids.dtype == np.int32
            assert one.top_logprobs.ravel().tolist() == pytest.approx(other.top_logprobs.ravel().tolist(), abs=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
async def test_as_the_cpu(cuda: pytest.MonkeyPatch, depth: int, expected: list[Results]) -> None:
    """Also where launches are enqueued piece by piece, so that sampling waits behind them."""
    with every_yield_is_a_turn(cuda):
        device = open_standin(tiny(RandomCheckpoint(SHAPE), 24), config())
        async with serving(device):
            same(await drive(device, steps(), depth=depth), expected)
        assert expected[4].errors.keys() == {0}


@pytest.mark.usefixtures("cuda")
async def test_masks_are_made_where_they_are_sent_from() -> None:
    """Each slot's in its own memory."""
    device = open_standin(tiny(RandomCheckpoint(SHAPE), 24), config())
    async with serving(device):
        for slot in (0, 1):
            room, staging = device.masks(slot, 3), device._slots[slot].late
            assert room.shape == (3, mask_words(VOCAB)) and room.flags.c_contiguous
            assert room.ctypes.data == staging.room(1).ctypes.data


@pytest.mark.usefixtures("cuda")
async def test_the_reference_decoder(expected: list[Results]) -> None:
    device = open_standin(tiny(RandomCheckpoint(SHAPE), 24), config(), fused=False)
    async with serving(device):
        same(await drive(device, steps()), expected)


async def test_what_is_expected(expected: list[Results]) -> None:
    """That the launches show what they are for."""
    assert expected[1].tokens[0] % 3 == 0
    assert expected[1].tokens[2] in ALLOWED.allowed
    assert 50 <= expected[3].tokens[0] < 60
    assert expected[3].tokens[2] in ALLOWED.allowed, "a processor only: the row's own ids still count"
    assert expected[4].tokens[1] in (7, 8), "a mask: in place of the row's own ids"
    assert isinstance(expected[4].errors[0], LookupError)
    assert expected[7].tokens[0] == 299
    row = [int(expected[step].tokens[index]) for step, index in ((2, 1), (3, 1), (5, 1))]
    assert len(set(row)) == 3 and max(row) < 100, "a penalty of 50 repeats nothing"
    assert [len(scores.logprobs) for results in expected for scores in results.scores] == [3, 1]
    assert [scores.top_ids.shape for results in expected for scores in results.scores] == [(3, 2), (1, 0)]


async def test_native_kernels(expected: list[Results]) -> None:
    """The third way to the same."""
    same(await on_the_cpu("native"), expected)


async def test_chunks_change_nothing(cuda: pytest.MonkeyPatch) -> None:
    """A prompt at once, or cut anywhere; a penalty would show if a chunk had counted."""
    sampling = RowSampling(
        seed=3, row=1, presence_penalty=60.0, repetition_penalty=1.2, prompt=ints(*PROMPT), logprobs=0
    )
    device = open_standin(tiny(RandomCheckpoint(SHAPE), 24), config())
    async with serving(device):

        async def run(*cuts: int) -> list[tuple[int, float]]:
            bounds = [0, *cuts, len(PROMPT)]
            parts: list[tuple[Batch, Late | None]] = [
                (
                    batch(
                        (1, begin, PROMPT[begin:end]),
                        pages=PAGES if begin == 0 else (),
                        admitted=[sampling] if begin == 0 else (),
                        counts=[0],
                        partial=[1] if end < len(PROMPT) else (),
                    ),
                    None,
                )
                for begin, end in itertools.pairwise(bounds)
            ]
            parts += [(batch((1, 7 + i, [PENDING]), counts=[1 + i]), None) for i in range(4)]
            found = (await drive(device, parts if len(parts) % 2 == 0 else [*parts, parts[-1]]))[len(cuts) :]
            assert all(one.logprobs is not None for one in found)
            return [(int(one.tokens[0]), float(one.logprobs[0])) for one in found[:5] if one.logprobs is not None]

        whole = await run()
        assert len({token for token, _ in whole}) == 5
        for cuts in ((4,), (1, 3, 6)):
            found = await run(*cuts)
            assert [token for token, _ in found] == [token for token, _ in whole]
            assert [value for _, value in found] == pytest.approx([value for _, value in whole], abs=1e-4)


async def test_a_greedy_step_takes_nothing_more(cuda: pytest.MonkeyPatch) -> None:
    """Rows without rules beside others: no kernel for them but those of the graph, and no copy."""
    from aphoton.device.cuda import sampler

    device = open_standin(tiny(RandomCheckpoint(SHAPE), 24), config())
    launched: list[Any] = []
    for name in ("sample", "adjust", "sample_ruled", "logprobs"):
        kernel = getattr(sampler, name)

        def counted(*args: Any, name: str = name, kernel: Any = kernel, **options: Any) -> Any:
            launched.append((name, options.get("many")))
            return kernel(*args, **options)

        cuda.setattr(sampler, name, counted)
    async with serving(device):
        greedy = [RowSampling(seed=0, row=row) for row in (2, 3)]
        ruled = RowSampling(seed=0, row=1, bias=((3, 100.0),))
        await drive(
            device,
            [
                (batch((2, 0, [1]), (3, 0, [2]), pages=PAGES, admitted=greedy), None),
                (batch((2, 1, [PENDING]), (3, 1, [PENDING])), None),
            ],
        )
        assert launched == []
        found = await drive(
            device,
            [
                (batch((1, 0, [4]), (2, 2, [PENDING]), admitted=[ruled]), None),
                (batch((1, 1, [PENDING]), (2, 3, [PENDING])), None),
                (batch((1, 2, [PENDING]), (2, 4, [PENDING]), late=[2]), late({1: [8]})),
            ],
        )
    assert [step.tokens[0] for step in found] == [3, 3, 3] and found[2].tokens[1] == 8
    assert [name for name, _ in launched] == ["adjust", "sample_ruled"] * 4
    # The last is a graph's, of as many rows as there may be.
    assert [rows for name, rows in launched if name == "sample_ruled"] == [1, 1, 1, 4]
