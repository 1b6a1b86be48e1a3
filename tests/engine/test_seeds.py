"""The same seed gives the same tokens, whoever shares the batch and whatever the depth of the pipeline."""

import asyncio
from typing import Literal

import pytest

from aphoton import Engine, SamplingParams

PARAMS = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=24),
    SamplingParams(temperature=1.0, seed=2, max_tokens=24),
    SamplingParams(temperature=1.0, seed=2**64 - 1, max_tokens=24),
    SamplingParams(temperature=0.7, top_k=20, seed=1, max_tokens=24),
    SamplingParams(temperature=1.3, top_p=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=2.0, min_p=0.05, seed=1, max_tokens=24),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=3, max_tokens=24, min_tokens=5),
    SamplingParams(temperature=1.0, seed=1, max_tokens=24, logprobs=3, stop_token_ids=[1, 2, 3], min_tokens=20),
    SamplingParams(max_tokens=24),
]
PROMPT = [10, 20, 30]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """Each by itself, one after the other."""

    async def run() -> list[tuple[int, ...]]:
        async with Engine("random:tiny", dtype="float32", pipeline_depth=1, max_rows=1) as engine:
            return [(await engine.generate(PROMPT, params)).token_ids for params in PARAMS]

    return asyncio.run(run())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_rows", [3, 16])
async def test_whoever_shares_the_batch(alone: list[tuple[int, ...]], depth: Literal[1, 2], max_rows: int) -> None:
    async with Engine("random:tiny", dtype="float32", pipeline_depth=depth, max_rows=max_rows) as engine:
        crowd = [
            asyncio.create_task(engine.generate([40 + i] * (1 + 7 * i), temperature=1.0, seed=i, max_tokens=5 + 9 * i))
            for i in range(8)
        ]
        for order in (1, -1):
            together = await asyncio.gather(*(engine.generate(PROMPT, params) for params in PARAMS[::order]))
            assert [done.token_ids for done in together][::order] == alone
        twice = await asyncio.gather(*(engine.generate(PROMPT, PARAMS[0]) for _ in range(5)))
        assert {done.token_ids for done in twice} == {alone[0]}, "beside itself too"
        await asyncio.gather(*crowd)


def test_other_seeds_give_other_tokens(alone: list[tuple[int, ...]]) -> None:
    assert len(set(alone)) == len(alone)
    assert len(set(alone[0])) > 12, "and they are random"


async def test_the_engines_seed_seeds_those_that_bring_none() -> None:
    async def run(seed: int | None) -> list[tuple[int, ...]]:
        async with Engine("random:tiny", dtype="float32", seed=seed) as engine:
            return [(await engine.generate(PROMPT, temperature=1.0, max_tokens=16)).token_ids for _ in range(3)]

    first, again, other, system, system_again = [await run(seed) for seed in (5, 5, 6, None, None)]
    assert first == again
    assert len({*first, *other, *system, *system_again}) == 12, "streams of their own"


async def test_greedy_draws_nothing(alone: list[tuple[int, ...]]) -> None:
    async with Engine("random:tiny", dtype="float32") as engine:
        for sampling in ({"seed": 5}, {"top_k": 3, "top_p": 0.5}, {"temperature": 1e-30, "seed": 7}):
            assert (await engine.generate(PROMPT, max_tokens=24, **sampling)).token_ids == alone[-1]
        assert (await engine.generate(PROMPT, max_tokens=24, temperature=5.0, top_k=1)).token_ids == alone[-1]
