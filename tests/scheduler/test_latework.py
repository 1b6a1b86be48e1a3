"""`LateWork`: masks on the loop and in a thread, and who ends while they are made."""

import threading
from collections.abc import Callable

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np
import pytest
from numpy.typing import NDArray
from scheduler.ticking import Ticking

from aphoton.sampling import mask_words
from aphoton.scheduler import Sequence
from aphoton.scheduler.latework import LateWork

VOCAB = 1000


class OneToken:
    """Allows one token, and says in which thread.

    :ivar meanwhile: called in the loop's thread while a mask is made in another, which waits for it.
    """

    def __init__(self, token: int, *, quick: bool = False, meanwhile: Callable[[], None] | None = None) -> None:
        self.token = token
        self.cost = 0.0 if quick else 1.0
        self.meanwhile = meanwhile
        self.threads: list[int] = []

    def fill(self, mask: NDArray[np.uint32]) -> None:
        self.threads.append(threading.get_ident())
        if self.meanwhile is not None:
            anyio.from_thread.run_sync(self.meanwhile)  # returns when the loop has called it
        mask[:] = 0
        mask[self.token // 32] = 1 << self.token % 32

    def accept(self, token: int) -> bool:
        return False


def tokens(mask: NDArray[np.uint32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def made(of: Ticking) -> LateWork:
    return LateWork(of.scheduler)


async def test_each_masked_row_gets_its_own_and_the_others_none() -> None:
    of = Ticking()
    quick, slow, other = OneToken(40, quick=True), OneToken(999), OneToken(31)
    for masker in (quick, None, slow, None, other):
        of.add([1], masker=masker)
    of.launch()
    assert of.newest.batch.late.tolist() == [True, False, True, False]
    late = await made(of).make(of.newest)
    assert late is not None
    assert late.masked.tolist() == [0, 2]
    assert late.masks.shape == (2, mask_words(VOCAB)) and late.masks.flags.c_contiguous
    assert [tokens(mask) for mask in late.masks] == [[40], [999]]
    here = threading.get_ident()
    assert quick.threads == [here] and slow.threads != [here] and not other.threads


async def test_whoever_ends_while_masks_are_made_is_left_out() -> None:
    of = Ticking()
    asks: list[Sequence] = []
    asks += [
        of.add([1], masker=OneToken(1)),
        of.add([2], masker=OneToken(2, meanwhile=lambda: of.scheduler.ends.abort(asks[1]))),
        of.add([3], masker=OneToken(3, meanwhile=lambda: of.scheduler.ends.abort(asks[0]))),
    ]
    of.launch()
    late = await made(of).make(of.newest)
    assert late is not None and late.masked.tolist() == [2] and [tokens(mask) for mask in late.masks] == [[3]]
    of.commit()
    assert [len(one.output) for one in asks] == [0, 0, 1]
    of.scheduler.ends.abort(asks[2])
    of.scheduler.check_idle()


async def test_everybody_ends_while_masks_are_made() -> None:
    of = Ticking()
    only = of.add([1], masker=OneToken(1, meanwhile=lambda: of.scheduler.ends.fail_all(lambda: ValueError("closed"))))
    of.launch()
    assert await made(of).make(of.newest) is None
    assert isinstance(only.error, ValueError)


class Broken(OneToken):
    def fill(self, mask: NDArray[np.uint32]) -> None:
        super().fill(mask)
        raise ValueError("no way on")


@pytest.mark.parametrize("quick", [True, False])
async def test_one_that_can_make_no_mask_ends_alone_with_its_error(quick: bool) -> None:
    of = Ticking()
    bad, good = of.add([1], masker=Broken(1, quick=quick)), of.add([2], masker=OneToken(2, quick=quick))
    of.launch()
    late = await made(of).make(of.newest)
    assert late is not None and late.masked.tolist() == [1] and tokens(late.masks[0]) == [2]
    assert str(bad.error) == "no way on"
    of.commit()
    assert (bad.output, len(good.output)) == ([], 1)


async def test_an_error_that_comes_too_late_is_nobodys() -> None:
    of = Ticking()
    only = of.add([1], masker=Broken(1, meanwhile=lambda: of.scheduler.ends.abort(only)))
    of.launch()
    assert await made(of).make(of.newest) is None
    assert only.finish_reason == "abort" and only.error is None


async def test_the_apps_threads_may_all_be_taken() -> None:
    of = Ticking()
    of.add([1], masker=OneToken(5))
    of.launch()
    limiter = anyio.to_thread.current_default_thread_limiter()
    taken = int(limiter.available_tokens)
    for borrower in range(taken):
        limiter.acquire_on_behalf_of_nowait(borrower)
    try:
        with anyio.fail_after(10):
            assert await made(of).make(of.newest) is not None
    finally:
        for borrower in range(taken):
            limiter.release_on_behalf_of(borrower)


async def test_processors_get_a_copy_of_the_output_as_of_the_last_commit() -> None:
    of = Ticking()

    def processor(output: object, logits: object) -> None:
        """No device calls it here."""

    only = of.add([1], processor=processor, limit=5)
    of.launch()
    first = await made(of).make(of.newest)
    of.launch()
    of.commit()
    second = await made(of).make(of.newest)
    assert first is not None and second is not None
    assert first.processors == [(0, processor, [])]
    ((_, _, output),) = second.processors
    assert output == only.output and output is not only.output
    assert not len(second.masked)
