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

from aphoton.device.sim import SimDevice
from aphoton.sampling import mask_words
from aphoton.sampling.masks import TURN
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


class Room(SimDevice):
    """A device of which nothing is wanted but room for masks.

    :ivar given: what it gave last.
    """

    def __init__(self) -> None:
        self.given = np.zeros((0, 0), np.uint32)

    def masks(self, slot: int, count: int) -> NDArray[np.uint32]:
        self.given = np.full((count, mask_words(VOCAB)), 0xA5A5A5A5, np.uint32)
        return self.given


def made(of: Ticking, room: Room | None = None) -> LateWork:
    return LateWork(of.scheduler, room or Room())


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


async def test_masks_are_where_the_device_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aphoton.sampling.masks.perf_counter", lambda: 0.0)
    of, room = Ticking(), Room()
    for token in (3, 4):
        of.add([1], masker=OneToken(token, quick=True))
    of.launch()
    late = await made(of, room).make(of.newest)
    assert late is not None and late.masks is room.given
    assert [tokens(mask) for mask in late.masks] == [[3], [4]]


async def test_no_mask_is_begun_on_the_loop_when_its_turn_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Ticking()
    seconds = iter([0.0, 0.4 * TURN, 0.9 * TURN, 1.1 * TURN, *[2 * TURN] * 9])
    monkeypatch.setattr("aphoton.sampling.masks.perf_counter", seconds.__next__)
    maskers = [OneToken(token, quick=True) for token in range(4)]
    for masker in maskers:
        of.add([1], masker=masker)
    of.launch()
    late = await made(of).make(of.newest)
    here = threading.get_ident()
    assert [masker.threads == [here] for masker in maskers] == [True, True, True, False]
    assert all(len(masker.threads) == 1 for masker in maskers)
    assert late is not None and [tokens(mask) for mask in late.masks] == [[0], [1], [2], [3]]


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


@pytest.mark.parametrize("worse", [0, 1, 2, 3])
async def test_an_error_is_its_own_sequences_wherever_the_masks_are_made(worse: int) -> None:
    """Two on the loop and two in a thread, not in that order."""
    of = Ticking()
    kinds = [Broken if index == worse else OneToken for index in range(4)]
    asks = [of.add([1], masker=kind(20 + i, quick=i in (1, 3))) for i, kind in enumerate(kinds)]
    of.launch()
    late = await made(of).make(of.newest)
    others = [index for index in range(4) if index != worse]
    assert [ask.error is not None for ask in asks] == [index == worse for index in range(4)]
    assert late is not None and sorted(late.masked.tolist()) == others
    assert [tokens(mask) for mask in late.masks] == [[20 + index] for index in late.masked.tolist()]


async def test_masks_of_a_thread_are_where_the_device_wants_them() -> None:
    """As long as nobody ends meanwhile."""
    of, room = Ticking(), Room()
    for index in range(3):
        of.add([1], masker=OneToken(index, quick=index == 1))
    of.launch()
    late = await made(of, room).make(of.newest)
    assert late is not None and late.masks is room.given
    assert [tokens(mask) for mask in late.masks] == [[index] for index in late.masked.tolist()]


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
