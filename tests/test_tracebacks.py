"""What is let go of, and what is not."""

import asyncio
import weakref

import pytest

from aphoton import Engine, EngineDead, SimModel
from aphoton.tracebacks import clear_traceback


class Held:
    """Something large."""


def fail(kept: list["weakref.ref[Held]"]) -> None:
    large = Held()
    kept.append(weakref.ref(large))
    raise OSError("the first")


def fail_again(kept: list["weakref.ref[Held]"]) -> None:
    large = Held()
    kept.append(weakref.ref(large))
    try:
        fail(kept)
    except OSError as error:
        raise RuntimeError("the second") from error


def test_nothing_of_a_chain_is_held() -> None:
    kept: list[weakref.ref[Held]] = []
    with pytest.raises(RuntimeError) as caught:
        fail_again(kept)
    assert all(one() is not None for one in kept)
    clear_traceback(caught.value)
    assert [one() for one in kept] == [None, None]
    caught.value.__cause__.__cause__ = caught.value  # type: ignore[union-attr]  # a circle ends, too
    clear_traceback(caught.value)


async def test_somebody_elses_task_that_has_caught_it_goes_on() -> None:
    failure: Exception | None = None
    go = asyncio.Event()

    async def supervisor() -> str:
        nonlocal failure
        try:
            raise OSError("upstream")
        except OSError as error:
            failure = error
        await go.wait()
        return "lives"

    def probe(call: str) -> None:
        if failure is not None:
            raise RuntimeError("a fault of the device") from failure

    async with Engine(SimModel(probe=probe)) as engine:
        task = asyncio.create_task(supervisor())
        await asyncio.sleep(0)
        with pytest.raises(EngineDead):
            await engine.generate("Hi")
    go.set()
    assert await task == "lives"
