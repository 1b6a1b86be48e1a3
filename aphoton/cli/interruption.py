"""`measure_interruptions`: what long prompts that arrive do to the streams that run."""

import asyncio
import time
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from aphoton import Engine, SamplingParams
from aphoton.cli.engine import open_engine
from aphoton.cli.figures import Spread, milliseconds
from aphoton.cli.terminal import say
from aphoton.cli.workload import Workload

__all__ = ["ANSWER", "Interruption", "measure_interruptions"]

ANSWER = 4
"""Tokens that a long prompt is answered with."""


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """Streams beside which long prompts arrive, the next one a quarter of its time after the last has been answered.

    :ivar budget: tokens of a step (``max_step_tokens``).
    :ivar prompts: long ones that were answered while all streams ran. None in the run without any.
    :ivar itl: of the streams, between pieces, as their consumers saw it.
    :ivar ttft: of the long prompts. None without any.
    :ivar tok_s: of the streams.
    """

    budget: int
    concurrency: int
    prompts: int | None
    itl: Spread
    ttft: Spread | None
    tok_s: float


async def measure_interruptions(
    model: str,
    settings: dict[str, Any],
    workload: Workload,
    concurrency: int,
    long_prompt: int,
    *,
    budgets: list[int],
    warmup: int,
) -> list[Interruption]:
    """The streams alone, and beside long prompts, with each budget.

    :param workload: of the streams, of at least two tokens.
    :param long_prompt: tokens of a long prompt.
    :param budgets: of a step, each on an engine of its own.
    :param warmup: runs beside long prompts that do not count, on each.
    """
    found: list[Interruption] = []
    for budget in budgets:
        async with aclosing(await open_engine(model, {**settings, "max_step_tokens": budget})) as engine:
            for _ in range(warmup):
                await _run(engine, workload, concurrency, long_prompt)
            say(f"{concurrency} streams, tokens in a step: {budget}")
            if not found:
                found.append(await _run(engine, workload, concurrency, None))
            found.append(await _run(engine, workload, concurrency, long_prompt))
    return found


async def _run(engine: Engine, workload: Workload, concurrency: int, long_prompt: int | None) -> Interruption:
    gaps: list[float] = []
    waits: list[float] = []
    running = concurrency
    vocab_size = engine.limits.vocab_size
    all_started = asyncio.Event()
    started = 0

    async def stream(index: int) -> None:
        nonlocal running, started
        params = SamplingParams(max_tokens=workload.output_tokens, ignore_eos=True)
        last: float | None = None
        async for _ in engine.stream(workload.prompt(index, vocab_size), params):
            now = time.perf_counter()
            if last is None:
                started += 1
                if started == concurrency:
                    all_started.set()
            elif all_started.is_set() and running == concurrency:
                gaps.append(now - last)
            last = now
        running -= 1

    async def interrupt(length: int) -> None:
        random = np.random.default_rng((workload.seed, length))
        await all_started.wait()
        while running == concurrency:
            # Another one each time: nothing of it is in a cache.
            prompt = random.integers(vocab_size, size=length).tolist()
            begin = time.perf_counter()
            done = await engine.generate(prompt, max_tokens=ANSWER, ignore_eos=True)
            if done.timings.ttft is not None and running == concurrency:
                waits.append(done.timings.ttft)
            await asyncio.sleep(0.25 * (time.perf_counter() - begin))

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(concurrency):
            group.create_task(stream(index))
        if long_prompt is not None:
            group.create_task(interrupt(long_prompt))
    itl = milliseconds(gaps)
    assert itl is not None
    return Interruption(
        budget=engine.config.max_step_tokens,
        concurrency=concurrency,
        prompts=None if long_prompt is None else len(waits),
        itl=itl,
        ttft=milliseconds(waits),
        tok_s=concurrency * workload.output_tokens / (time.perf_counter() - begin),
    )
