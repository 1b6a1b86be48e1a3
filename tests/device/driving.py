"""A device driven as the pipeline does, by launches made by hand."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from aphoton.device.base import Batch, Device, Late, Results

__all__ = ["drive", "serving"]


@asynccontextmanager
async def serving(device: Device) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        await group.start(device.serve)
        try:
            yield
        finally:
            device.stop()


async def drive(device: Device, steps: Sequence[tuple[Batch, Late | None]], *, depth: int = 2) -> list[Results]:
    """The results of each step. At depth 2 a step is sampled when the one before has been read.

    Masks are written to the device's room for them, as the engine does, in every other step with some; else they are an
    array of the caller's.
    """
    in_place = False
    results: list[Results] = []

    async def read(number: int) -> None:
        found = await device.results(number % 2)
        results.append(
            Results(
                tokens=found.tokens.copy(),
                began=found.began,
                ended=found.ended,
                faulty=None if found.faulty is None else found.faulty.copy(),
                logprobs=None if found.logprobs is None else found.logprobs.copy(),
                top_ids=None if found.top_ids is None else found.top_ids.copy(),
                top_logprobs=None if found.top_logprobs is None else found.top_logprobs.copy(),
                scores=found.scores,
                errors=dict(found.errors),
            )
        )
        device.release(number % 2)

    for number, (batch, late) in enumerate(steps):
        device.launch(number % 2, batch)
        if depth == 2 and number:
            await read(number - 1)
        if late is not None and (in_place := not in_place):
            room = device.masks(number % 2, len(late.masked))
            room[:] = late.masks
            late = dataclasses.replace(late, masks=room)
        device.sample(number % 2, late)
        if depth == 1:
            await read(number)
        await asyncio.sleep(0)
    if depth == 2:
        await read(len(steps) - 1)
    return results
