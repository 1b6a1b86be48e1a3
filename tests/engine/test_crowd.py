"""A thousand requests on the CPU, half of them given up at random moments."""

import asyncio
import random
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from engine.waiting import idle

from aphoton import Completion, Engine
from aphoton.observe import Span

COUNT = 1000
NEAR = 1e-3
"""Greedy choices between tokens whose log-probabilities are nearer than this may turn out either way where sums are
taken in another order, as torch does for another number of rows."""


@dataclass(frozen=True)
class Ask:
    """:ivar pieces: those after which it leaves. None: it stays, or is cancelled from outside."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    cancelled: bool
    pieces: int | None


def crowd(*, sampled: bool, longest: int) -> list[Ask]:
    rng = random.Random(7)
    asks = []
    for number in range(COUNT):
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, longest), "logprobs": 2}
        if rng.random() < 0.3:
            sampling["stop_token_ids"] = rng.sample(range(512), 16)
        if sampled and rng.random() < 0.5:
            sampling |= {"temperature": 1.0, "seed": number, "top_p": rng.choice((1.0, 0.9))}
        gives_up = number % 2 == 1
        leaves = gives_up and rng.random() < 0.3
        asks.append(
            Ask(
                prompt=tuple(rng.randrange(512) for _ in range(rng.choice((1, 3, 17, 40)))),
                sampling=sampling,
                cancelled=gives_up and not leaves,
                pieces=rng.randint(1, 4) if leaves else None,
            )
        )
    return asks


async def consume(engine: Engine, ask: Ask, tokens: list[int]) -> Completion | None:
    stream = engine.stream(ask.prompt, **ask.sampling)
    pieces = 0
    async for piece in stream:
        assert piece.token_ids or piece.finish_reason, "a piece has something in it"
        tokens += piece.token_ids
        pieces += 1
        if pieces == ask.pieces:
            return None
    return await stream.completion()


@pytest.mark.parametrize(
    ("kernels", "depth", "longest"), [("native", 2, 12), ("native", 1, 12), ("torch", 2, 5), ("torch", 1, 5)]
)
async def test_survivors_have_the_tokens_of_a_run_without_cancellations(
    kernels: Literal["native", "torch"], depth: Literal[1, 2], longest: int
) -> None:
    if kernels == "native":
        from aphoton.kernels import native_available

        if native_available() is not None:
            pytest.skip(str(native_available()))
    asks = crowd(sampled=kernels == "native", longest=longest)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "kernels": kernels,
        "pipeline_depth": depth,
        "max_rows": 48,
        "max_waiting": 100,
        "kv_pages": 120,
        "max_step_tokens": 512,
    }
    async with Engine("random:tiny", **settings) as engine:
        expected = await asyncio.gather(*(engine.generate(ask.prompt, **ask.sampling) for ask in asks))
        await idle(engine)
        phases = 4 * engine.stats().steps

    rng = random.Random(8)
    tokens: list[list[int]] = [[] for _ in asks]
    async with Engine("random:tiny", **settings) as engine:
        tasks = [asyncio.create_task(consume(engine, ask, tokens[number])) for number, ask in enumerate(asks)]
        victims = [task for task, ask in zip(tasks, asks, strict=True) if ask.cancelled]
        rng.shuffle(victims)
        moments = sorted((rng.randrange(phases // 2) for _ in victims), reverse=True)
        passed = 0

        def cancel_some(span: Span) -> None:
            nonlocal passed
            passed += 1  # launch, wait, commit, sample and the device's own: any of them may be the moment
            while moments and moments[-1] <= passed:
                moments.pop()
                victims.pop().cancel()

        engine.timeline.on_span = cancel_some
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await idle(engine)

    survivors = 0
    for ask, got, result, reference in zip(asks, tokens, results, expected, strict=True):
        if isinstance(result, Completion):
            survivors += 1
            assert got == list(result.token_ids)
        elif ask.cancelled:
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert result is None
        firm = len(reference.token_ids) if kernels == "native" else _firm(reference)
        assert got[:firm] == list(reference.token_ids[: min(firm, len(got))])
        if isinstance(result, Completion) and firm == len(reference.token_ids):
            assert result.token_ids == reference.token_ids
            assert (result.text, result.finish_reason) == (reference.text, reference.finish_reason)
    assert COUNT // 2 <= survivors < 0.8 * COUNT


def _firm(done: Completion) -> int:
    """How many of its tokens had no near rival, up to the first that had."""
    assert done.logprobs is not None
    for count, entry in enumerate(done.logprobs):
        (_, best), (_, second) = entry.top
        if best - second < NEAR:
            return count
    return len(done.logprobs)
