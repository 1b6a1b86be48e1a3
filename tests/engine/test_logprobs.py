"""Log-probabilities against those of the model run by itself."""

import asyncio
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from aphoton import Completion, Engine
from aphoton.attention import KVCache
from aphoton.models import Decoder, StepInput, random_checkpoint

PROMPT = [10, 20, 30, 40]
PAGES = 4
"""Of each row below; the longest sequence must fit."""


def step(rows: list[list[int]]) -> StepInput:
    """Prefill of all ``rows``, each in pages of its own."""
    lengths = np.array([len(row) for row in rows], np.int32)
    starts = np.zeros(len(rows), np.int32)
    tables = 1 + np.arange(len(rows) * PAGES, dtype=np.int32).reshape(-1, PAGES)
    return StepInput(
        tokens=torch.tensor([token for row in rows for token in row]),
        starts=torch.from_numpy(starts),
        lengths=torch.from_numpy(lengths),
        tables=torch.from_numpy(tables),
        host_starts=starts,
        host_lengths=lengths,
    )


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    checkpoint = random_checkpoint("random:tiny")
    return Decoder.load(checkpoint.config, checkpoint.weights(), dtype=torch.float32, source="random:tiny")


@torch.inference_mode()
def distributions(decoder: Decoder, tokens: tuple[int, ...]) -> Tensor:
    """[n, V] the log-probabilities from which each of ``tokens`` was chosen."""
    rows = [PROMPT + list(tokens[:count]) for count in range(len(tokens))]
    config = decoder.config
    kv = KVCache(
        layers=config.num_layers,
        pages=1 + PAGES * len(rows),
        page_size=16,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )
    return decoder.forward(step(rows), kv).log_softmax(dim=1)


def check(decoder: Decoder, done: Completion, top: int) -> None:
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
    expected = distributions(decoder, done.token_ids)
    for token, entry, row in zip(done.token_ids, done.logprobs, expected, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert len(entry.top) == top
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)
        assert values == pytest.approx([float(row[token]) for token, _ in entry.top], abs=1e-3)
        assert len({token for token, _ in entry.top}) == top
        assert all(type(token) is int for token, _ in entry.top)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_they_are_the_models(decoder: Decoder, depth: Literal[1, 2], kernels: Literal["auto", "torch"]) -> None:
    """Of the model's distribution: before temperature, filters and what may not be sampled yet."""
    asks: list[tuple[int, dict[str, Any]]] = [
        (0, {}),
        (1, {}),
        (5, {"temperature": 1.0, "seed": 1}),
        (64, {"temperature": 3.0, "seed": 2, "top_k": 5}),
        (3, {"stop_token_ids": list(range(0, 512, 8)), "min_tokens": 12}),
    ]
    async with Engine("random:tiny", dtype="float32", kernels=kernels, pipeline_depth=depth) as engine:
        plain = engine.generate(PROMPT, max_tokens=12)
        asked = [engine.generate(PROMPT, max_tokens=12, logprobs=top, **sampling) for top, sampling in asks]
        without, *done = await asyncio.gather(plain, *asked)
        assert without.logprobs is None and without.outputs[0].logprobs is None
        assert done[0].token_ids == done[1].token_ids == without.token_ids, "asking changes no token"
        for (top, _), one in zip(asks, done, strict=True):
            check(decoder, one, top)
        assert all(token % 8 for token in done[-1].token_ids), "what was banned"
        assert any(token % 8 == 0 for entry in done[-1].logprobs or () for token, _ in entry.top), "is reported"


async def test_pieces_carry_those_of_their_tokens(tiny: Engine) -> None:
    stream = tiny.stream(PROMPT, max_tokens=20, logprobs=2)
    pieces = [piece async for piece in stream]
    for piece in pieces:
        assert piece.logprobs is not None
        assert [entry.token_id for entry in piece.logprobs] == list(piece.token_ids)
    done = await stream.completion()
    assert done.logprobs == tuple(entry for piece in pieces for entry in piece.logprobs or ())
    assert all(piece.logprobs is None for piece in [piece async for piece in tiny.stream(PROMPT, max_tokens=3)])
