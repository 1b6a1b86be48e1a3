"""`SimDevice`: its clock, its script, and the rules that it holds the scheduler to."""

import asyncio

import anyio
import msgspec
import numpy as np
import pytest
from device.batches import PAGE, batch, row

from aphoton import InvalidRequest, SimCosts, SimModel
from aphoton.device.base import PENDING, Device, Late, Limits, Scored
from aphoton.device.sim import SimDevice, SimFault
from aphoton.sampling import RowSampling, mask_words

COSTS = SimCosts(launch=1.0, forward=10.0, forward_token=0.5, sampling=2.0, copy=0.25, commit=4.0)


def total(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
    """A script that shows all that a token depends on."""
    return sum(history) + 100 * seed


def device(**model: object) -> SimDevice:
    return SimDevice(
        SimModel(**{"script": total, "costs": COSTS, **model}),  # type: ignore[arg-type]
        pages=10,
        page_size=PAGE,
        max_rows=3,
    )


def prefill(tokens: list[int], *, number: int = 1, page: int = 1, seed: int = 0, temperature: float = 0.0):  # type: ignore[no-untyped-def]
    return batch(
        (number, 0, tokens), pages=[(number, 0, page)], admitted=[row(number, seed=seed, temperature=temperature)]
    )


NAN, INF = float("nan"), float("inf")
LIMITS = Limits(vocab_size=10, max_model_len=20, pages=2, eos_token_ids=(9,))


@pytest.mark.parametrize(
    ("given", "field", "values"),
    [
        (SimCosts(), "launch", [-1e-9, NAN, INF, -INF, 1e10, None, "1", True]),
        (SimCosts(), "forward_token", [-1]),
        (SimModel(), "vocab_size", [0, -1, 2.0, True, None, 2**31]),
        (SimModel(), "max_model_len", [0, 1.5, 2**31]),
        (SimModel(), "eos_token_ids", [5, None, (-1,), (1000,), (1.0,), (True,)]),
        (SimModel(), "turns", [(), (0,), (1, -1), 3, (1.0,)]),
        (SimModel(), "costs", [None, 1.0, {"launch": 1.0}]),
        (SimModel(), "script", [None, "script"]),
        (SimModel(), "probe", [5]),
        (LIMITS, "vocab_size", [0, -1, None]),
        (LIMITS, "max_model_len", [0]),
        (LIMITS, "pages", [0, 1, 2**31]),
        (LIMITS, "eos_token_ids", [(10,), (-1,), 9]),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: msgspec.Struct, field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            msgspec.structs.replace(given, **{field: value})
        assert caught.value.field == field, value


def test_lists_are_copied() -> None:
    ends, turns = [1, 2], [3]
    model = SimModel(eos_token_ids=ends, turns=turns)  # type: ignore[arg-type]
    ends.append(-1)
    turns.append(0)
    assert (model.eos_token_ids, model.turns) == ((1, 2), (3,))
    assert hash(model) == hash(SimModel(eos_token_ids=(1, 2), turns=(3,)))


def test_it_is_a_device() -> None:
    made: Device = device()
    assert (made.limits.pages, made.limits.vocab_size, made.limits.eos_token_ids) == (10, 1000, (0,))


async def test_tokens_are_of_what_stands_in_the_pages() -> None:
    """Two steps in flight: the second takes the first one's token on the device."""
    sim = device()
    sim.launch(0, prefill([1, 2, 3], page=5))
    sim.sample(0)
    sim.launch(1, batch((1, 3, [PENDING])))
    first = await sim.results(0)
    assert first.tokens.tolist() == [6]
    sim.release(0)
    sim.sample(1)
    sim.launch(0, batch((1, 4, [PENDING]), pages=[(1, 1, 7)]))
    second = await sim.results(1)
    assert second.tokens.tolist() == [12]
    sim.release(1)
    sim.sample(0)
    assert (await sim.results(0)).tokens.tolist() == [24]


async def test_several_rows_and_their_seeds() -> None:
    sim = device()
    rows = [row(2, seed=3, temperature=1.0), row(1, seed=3)]
    sim.launch(0, batch((2, 0, [1, 2, 3, 4, 5]), (1, 0, [7]), pages=[(2, 0, 1), (2, 1, 2), (1, 0, 3)], admitted=rows))
    sim.sample(0)
    results = await sim.results(0)
    assert results.tokens.tolist() == [315, 7], "a greedy row has no seed"


async def test_banned_tokens_wait_for_min_tokens() -> None:
    sim = device(script=lambda history, seed, vocab: 5)
    sampling = RowSampling(seed=0, row=1, min_tokens=2, banned=(5, 6))
    sim.launch(0, batch((1, 0, [1]), pages=[(1, 0, 1)], admitted=[sampling]))
    sim.sample(0)
    assert (await sim.results(0)).tokens.tolist() == [7]
    sim.release(0)
    for count, expected in ((1, 7), (2, 5)):
        sim.launch(count % 2, batch((1, count, [PENDING]), counts=[count]))
        sim.sample(count % 2)
        assert (await sim.results(count % 2)).tokens.tolist() == [expected]
        sim.release(count % 2)


async def test_the_clock() -> None:
    sim = device()
    assert sim.now() == 0
    sim.launch(0, prefill([1, 2]))
    assert sim.now() == 1, "the host has launched"
    sim.sample(0)
    first = await sim.results(0)
    assert (first.began, first.ended) == (1, 1 + 10 + 2 * 0.5 + 2)
    assert sim.now() == first.ended + 0.25, "copied"
    sim.release(0)
    assert sim.now() == first.ended + 0.25 + 4, "committed"


async def test_two_slots_share_the_device_one_after_the_other() -> None:
    sim = device()
    sim.launch(0, prefill([1, 2]))
    sim.sample(0)
    sim.launch(1, batch((1, 2, [PENDING])))
    first = await sim.results(0)
    sim.release(0)
    sim.sample(1)
    second = await sim.results(1)
    assert second.began == first.ended, "no gap"
    # Its forward ran while the host committed, its sampling waits for the host that launches it.
    host = first.ended + 0.25 + 4
    assert second.ended == max(first.ended + 10.5, host) + 2


async def test_results_give_the_loop_its_turns() -> None:
    sim = device(turns=(1, 3))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    await asyncio.sleep(0)
    for step, expected in enumerate((1, 3, 1)):
        sim.launch(step % 2, prefill([1]) if step == 0 else batch((1, step, [PENDING])))
        sim.sample(step % 2)
        before = turns
        await sim.results(step % 2)
        assert turns - before == expected
        sim.release(step % 2)
    counter.cancel()


async def test_what_was_released_cannot_be_read() -> None:
    sim = device()
    sim.launch(0, prefill([1]))
    sim.sample(0)
    results = await sim.results(0)
    kept = results.tokens
    sim.release(0)
    assert kept.tolist() == [-1], "a view of the slot's buffers"


def test_a_slot_has_its_order() -> None:
    sim = device()
    with pytest.raises(SimFault, match="no forward"):
        sim.sample(0)
    sim.launch(0, prefill([1]))
    with pytest.raises(SimFault, match="before its results were read"):
        sim.launch(0, batch((1, 1, [PENDING])))
    with pytest.raises(SimFault, match="before it was sampled"):
        sim.results(0).send(None)
    sim.sample(0)
    with pytest.raises(SimFault, match="no forward"):
        sim.sample(0)


def test_a_page_in_flight_belongs_to_its_row() -> None:
    sim = device()
    sim.launch(0, prefill([1], number=1, page=1))
    sim.sample(0)
    with pytest.raises(SimFault, match="page 1 was given to row 2"):
        sim.launch(1, prefill([1], number=2, page=1))


def test_a_row_in_flight_belongs_to_its_sequence() -> None:
    sim = device()
    sim.launch(0, prefill([1], number=1, page=1))
    sim.sample(0)
    with pytest.raises(SimFault, match="row 1 was given away"):
        sim.launch(1, prefill([1], number=1, page=2))


async def test_pages_and_rows_are_free_once_their_steps_are_read() -> None:
    sim = device()
    sim.launch(0, prefill([1], number=1, page=1))
    sim.sample(0)
    await sim.results(0)
    sim.release(0)
    sim.launch(1, prefill([2], number=1, page=1))
    sim.sample(1)
    assert (await sim.results(1)).tokens.tolist() == [2]


async def test_a_probe_sees_each_call_and_may_fail_it() -> None:
    calls: list[str] = []

    def probe(call: str) -> None:
        calls.append(call)
        if call == "results":
            raise OSError("injected")

    sim = device(probe=probe)
    sim.launch(0, prefill([1]))
    sim.sample(0)
    with pytest.raises(OSError, match="injected"):
        await sim.results(0)
    assert calls == ["launch", "sample", "results"]


async def test_it_serves_until_it_is_stopped() -> None:
    sim = device()
    async with anyio.create_task_group() as group:
        await group.start(sim.serve)
        sim.stop()


def masks(rows: dict[int, set[int]], size: int = 1000) -> Late:
    """:param rows: allowed tokens by index in the batch."""
    bits = np.zeros((len(rows), 32 * mask_words(size)), np.bool_)
    for place, tokens in enumerate(rows.values()):
        bits[place, list(tokens)] = True
    return Late(
        masked=np.array(list(rows), np.int32),
        masks=np.packbits(bits, axis=1, bitorder="little").view(np.uint32),
    )


async def test_a_prompt_in_parts_is_sampled_at_its_end() -> None:
    sim = device()
    sim.launch(0, batch((1, 0, [1, 2]), pages=[(1, 0, 1)], admitted=[row(1)], partial=[1]))
    sim.sample(0)
    await sim.results(0)
    sim.release(0)
    sim.launch(1, batch((1, 2, [3]), counts=[0]))
    sim.sample(1)
    assert (await sim.results(1)).tokens.tolist() == [6]


async def test_behind_a_part_of_a_prompt_no_token_is_pending() -> None:
    sim = device()
    sim.launch(0, batch((1, 0, [1, 2]), pages=[(1, 0, 1)], admitted=[row(1)], partial=[1]))
    sim.sample(0)
    sim.launch(1, batch((1, 2, [PENDING])))
    await sim.results(0)
    sim.sample(1)
    with pytest.raises(KeyError):
        await sim.results(1)


async def test_a_page_is_read_by_the_launch_behind_the_one_that_fills_it_and_written_by_no_other() -> None:
    sim = device()
    sim.launch(0, prefill([1, 2, 3, 4], number=1, page=1))
    sim.sample(0)
    sim.launch(1, batch((2, 4, [5]), pages=[(2, 0, 1), (2, 1, 2)], admitted=[row(2)]))
    assert (await sim.results(0)).tokens.tolist() == [10]
    sim.release(0)
    sim.sample(1)
    assert (await sim.results(1)).tokens.tolist() == [15], "what stands in the shared page"
    sim.release(1)
    with pytest.raises(SimFault, match="page 1 is written for row 1 while another row of the launch has it"):
        sim.launch(0, batch((2, 5, [PENDING]), (1, 3, [9])))


async def test_masks_and_allowed_ids() -> None:
    """The script's token, or the next above it that may come, around the end."""
    sim = device(script=lambda history, seed, vocab: 500)
    allowed = [RowSampling(seed=0, row=3, allowed=(3, 7)), RowSampling(seed=0, row=1, allowed=(3, 7)), row(2)]
    pages = [(number, 0, number) for number in (1, 2, 3)]
    sim.launch(0, batch((1, 0, [1]), (2, 0, [1]), (3, 0, [1]), pages=pages, admitted=allowed, late=[1, 2]))
    sim.sample(0, masks({0: {600, 999}, 1: {1, 500}}))
    assert (await sim.results(0)).tokens.tolist() == [600, 500, 3]


async def test_masks_in_its_room_are_read_when_the_step_runs() -> None:
    """As a copy to a GPU does; others are copied at once."""

    async def sampled(*, in_place: bool) -> int:
        sim = device()
        sim.launch(0, batch((1, 0, [1]), pages=[(1, 0, 1)], admitted=[row(1)], late=[1]))
        late = masks({0: {600}})
        if in_place:
            room = sim.masks(0, 1)
            room[:] = late.masks
            late.masks = room
        sim.sample(0, late)
        late.masks[:] = masks({0: {700}}).masks
        return int((await sim.results(0)).tokens[0])

    assert [await sampled(in_place=True), await sampled(in_place=False)] == [700, 600]


def test_there_is_room_for_masks_between_launch_and_sampling_only() -> None:
    sim = device()
    with pytest.raises(SimFault, match="no forward to make masks for"):
        sim.masks(0, 1)
    sim.launch(0, batch((1, 0, [1]), pages=[(1, 0, 1)], admitted=[row(1)], late=[1]))
    room = sim.masks(0, 1)
    assert room.shape == (1, mask_words(1000)) and room.any(), "what is in it means nothing"
    sim.sample(0, masks({0: {600}}))
    with pytest.raises(SimFault, match="no forward to make masks for"):
        sim.masks(0, 1)


async def test_where_nothing_may_come_the_row_is_barred() -> None:
    sim = device()
    banned = RowSampling(seed=0, row=1, min_tokens=1, banned=(4, 5))
    admitted = [banned, row(2)]
    sim.launch(0, batch((1, 0, [1]), (2, 0, [1]), pages=[(1, 0, 1), (2, 0, 2)], admitted=admitted, late=[1, 2]))
    sim.sample(0, masks({0: {4, 5}, 1: {4, 5}}))
    results = await sim.results(0)
    assert results.barred is not None and results.barred.tolist() == [True, False]
    assert results.tokens[1] == 4


def test_masks_that_cannot_be() -> None:
    def launched() -> SimDevice:
        sim = device()
        pages = [(number, 0, number) for number in (1, 2, 3)]
        rows = [row(number) for number in (1, 2, 3)]
        sim.launch(
            0, batch((1, 0, [1]), (2, 0, [1]), (3, 0, [1]), pages=pages, admitted=rows, late=[1, 2], partial=[2])
        )
        return sim

    for late, why in (
        (masks({2: {1}}), "a mask for row 3"),
        (masks({1: {1}}), "a mask for row 2"),
        (masks({0: {1}}, size=960), "masks of"),
        (Late(masked=np.array([0, 0], np.int32), masks=masks({0: {1}, 1: {1}}).masks), "two masks"),
        (Late(masked=np.zeros(0, np.int32), masks=masks({}).masks, processors=[(0, print, [])]), "no logits"),  # type: ignore[list-item]
    ):
        with pytest.raises(SimFault, match=why):
            launched().sample(0, late)
    launched().sample(0, masks({0: {1}}))


async def test_scores_are_certain_and_their_targets_are_what_follows() -> None:
    sim = device()
    targets = np.array([2, 3, 4], np.int32)
    launch = batch(
        (1, 0, [1, 2, 3]),
        pages=[(1, 0, 1)],
        admitted=[row(1)],
        partial=[1],
        scored=[Scored(index=0, targets=targets, top=2)],
    )
    sim.launch(0, launch)
    sim.sample(0)
    (scores,) = (await sim.results(0)).scores
    assert scores.logprobs.tolist() == [0.0] * 3 and scores.top_ids.shape == (3, 0)
    for wrong in ([2, 4, 4], [2, 3, 4, 5], []):
        launch.scored = [Scored(index=0, targets=np.array(wrong, np.int32), top=0)]
        with pytest.raises(SimFault, match="targets of row 1"):
            device().launch(0, launch)
