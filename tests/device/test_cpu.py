"""`CpuDevice`: what its model is given, and how results come back."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
import torch
from device.batches import PAGE, batch, row
from torch import Tensor

from aphoton.attention import KVCache
from aphoton.device.base import PENDING, Device, Late, Limits, Scored
from aphoton.device.cpu import CpuDevice
from aphoton.models import StepInput
from aphoton.sampling import RowSampling, mask_words

VOCAB = 50


class Recorder:
    """A model that keeps its inputs. Behind token t comes t + 1."""

    def __init__(self) -> None:
        self.steps: list[StepInput] = []
        self.thread: threading.Thread | None = None
        self.before: Callable[[], None] | None = None

    def forward(self, step: StepInput, kv: KVCache) -> Tensor:
        if self.before is not None:
            self.before()
        self.thread = threading.current_thread()
        self.steps.append(step)
        return self._behind(step.tokens[step.lengths.cumsum(0) - 1])

    def forward_scored(
        self, step: StepInput, kv: KVCache, scored: Mapping[int, int], take: Callable[[int, Tensor], None]
    ) -> Tensor:
        """One token at a time."""
        for index, count in scored.items():
            begin = int(step.lengths[:index].sum())
            for at in range(begin, begin + count):
                take(index, self._behind(step.tokens[at : at + 1]))
        return self.forward(step, kv)

    def _behind(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(len(tokens), VOCAB)
        logits[torch.arange(len(tokens)), (tokens + 1) % VOCAB] = 9.0
        return logits


@asynccontextmanager
async def serving(model: Recorder) -> AsyncIterator[CpuDevice]:
    kv = KVCache(layers=1, pages=20, page_size=PAGE, kv_heads=1, head_dim=2, dtype=torch.float32)
    limits = Limits(vocab_size=VOCAB, max_model_len=40, pages=20, eos_token_ids=(0,))
    device = CpuDevice(model, kv, limits, max_rows=4)
    task = asyncio.create_task(serve(device))
    try:
        while device._loop is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        yield device
    finally:
        device.stop()
        await task


async def serve(device: Device) -> None:
    async with anyio.create_task_group() as group:
        await group.start(device.serve)


async def test_two_steps_in_flight() -> None:
    """The second takes the first one's tokens before they have been read."""
    model = Recorder()
    async with serving(model) as device:
        device.launch(
            0,
            batch(
                (3, 0, [7, 8, 9, 10, 11]),
                (1, 0, [20]),
                pages=[(3, 0, 4), (3, 1, 5), (1, 0, 6)],
                admitted=[row(3), row(1)],
            ),
        )
        device.sample(0)
        device.launch(
            1, batch((1, 1, [PENDING]), (3, 5, [PENDING]), (2, 0, [30, 31]), pages=[(2, 0, 9)], admitted=[row(2)])
        )
        device.sample(1)
        first = await device.results(0)
        device.release(0)
        second = await device.results(1)
        device.release(1)
    assert first.tokens.tolist() == [12, 21]
    assert second.tokens.tolist() == [22, 13, 32]
    assert first.faulty is not None and not first.faulty.any()
    assert 0 < first.began <= first.ended <= second.began <= second.ended
    one, other = model.steps
    assert one.tokens.tolist() == [7, 8, 9, 10, 11, 20]
    assert (one.starts.tolist(), one.lengths.tolist()) == ([0, 0], [5, 1])
    assert one.tables.tolist() == [[4, 5], [6, 0]], "as many columns as the longest row needs, page 0 behind"
    assert other.tokens.tolist() == [21, 12, 30, 31]
    assert other.starts.tolist() == other.host_starts.tolist() == [1, 5, 0]
    assert other.lengths.tolist() == other.host_lengths.tolist() == [1, 1, 2]
    assert other.tables.tolist() == [[6, 0], [4, 5], [9, 0]]
    assert other.tokens.dtype == torch.int64 and other.tables.dtype == other.starts.dtype == torch.int32


async def test_what_a_step_was_given_does_not_change_with_the_next() -> None:
    """The scheduler goes on while the worker has not begun."""
    model = Recorder()
    go = threading.Event()
    model.before = go.wait
    async with serving(model) as device:
        device.launch(0, batch((1, 0, [5]), pages=[(1, 0, 1)], admitted=[row(1)]))
        device.sample(0)
        device.launch(1, batch((1, 1, [PENDING]), (2, 0, [8]), pages=[(2, 0, 2)], admitted=[row(2)]))
        go.set()
        await device.results(0)
        device.release(0)
        device.sample(1)
        await device.results(1)
    assert model.steps[0].tables.tolist() == [[1]]
    assert model.steps[1].tables.tolist() == [[1], [2]]


async def test_a_row_that_is_used_again_has_its_new_pages() -> None:
    model = Recorder()
    async with serving(model) as device:
        for slot, (page, token) in enumerate(((3, 5), (8, 6))):
            device.launch(slot, batch((1, 0, [token]), pages=[(1, 0, page)], admitted=[row(1)]))
            device.sample(slot)
            assert (await device.results(slot)).tokens.tolist() == [token + 1]
            device.release(slot)
    assert [step.tables.tolist() for step in model.steps] == [[[3]], [[8]]]


async def test_logprobs_come_when_a_row_asks() -> None:
    async with serving(Recorder()) as device:
        device.launch(0, batch((1, 0, [5]), pages=[(1, 0, 1)], admitted=[row(1)]))
        device.sample(0)
        without = await device.results(0)
        assert without.logprobs is None and without.top_ids is None and without.top_logprobs is None
        device.release(0)
        device.launch(1, batch((1, 1, [PENDING]), (2, 0, [5]), pages=[(2, 0, 2)], admitted=[row(2, logprobs=3)]))
        device.sample(1)
        results = await device.results(1)
        assert results.logprobs is not None and results.top_ids is not None and results.top_logprobs is not None
        assert results.top_ids.shape == results.top_logprobs.shape == (2, 3)
        assert results.top_ids[:, 0].tolist() == results.tokens.tolist() == [7, 6]
        assert results.top_logprobs[:, 0].tolist() == results.logprobs.tolist()


async def test_results_that_are_there_give_the_loop_a_turn_all_the_same() -> None:
    async with serving(Recorder()) as device:
        device.launch(0, batch((1, 0, [5]), pages=[(1, 0, 1)], admitted=[row(1)]))
        device.sample(0)
        done = device._slots[0].done
        assert done is not None
        await asyncio.wait([done])
        ran: list[bool] = []
        asyncio.get_running_loop().call_soon(ran.append, True)
        await device.results(0)
        assert ran


async def test_steps_run_in_one_thread_that_is_not_the_loops() -> None:
    model = Recorder()
    async with serving(model) as device:
        device.launch(0, batch((1, 0, [5]), pages=[(1, 0, 1)], admitted=[row(1)]))
        device.sample(0)
        await device.results(0)
        assert model.thread is not None and model.thread is not threading.current_thread()
    assert device._model is None and device._kv is None, "stopped: nothing is held"


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_fault_comes_from_the_results_and_no_step_follows(ahead: bool) -> None:
    model = Recorder()

    def fail() -> None:
        raise OSError("injected")

    model.before = fail
    async with serving(model) as device:
        device.launch(0, batch((1, 0, [5]), pages=[(1, 0, 1)], admitted=[row(1)]))
        device.sample(0)
        if ahead:
            device.launch(1, batch((1, 1, [PENDING])))
        with pytest.raises(OSError, match="injected"):
            await device.results(0)
        device.release(0)
        model.before = None
        if not ahead:
            device.launch(1, batch((1, 1, [PENDING])))
        device.sample(1)
        with pytest.raises(OSError, match="injected"):
            await device.results(1)
    assert model.steps == []


async def test_nobody_awaits_the_results_any_more() -> None:
    model = Recorder()
    go = threading.Event()
    model.before = go.wait
    async with serving(model) as device:
        device.launch(0, batch((1, 0, [5]), pages=[(1, 0, 1)], admitted=[row(1)]))
        device.sample(0)
        waiting = asyncio.create_task(device.results(0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.set()
    assert len(model.steps) == 1


def masks(*lines: Sequence[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.uint32]]":
    words = np.zeros((len(lines), mask_words(VOCAB)), np.uint32)
    for line, tokens in zip(words, lines, strict=True):
        for token in tokens:
            line[token // 32] |= np.uint32(1 << token % 32)
    return words


async def test_late_rows() -> None:
    """Masks and processors come with the sampling, in the worker; the next step has what they led to."""
    model, threads = Recorder(), []

    def prefer(output: Sequence[int], logits: Tensor) -> None:
        threads.append(threading.current_thread())
        logits[30 + len(output)] = 90.0

    def fail(output: Sequence[int], logits: Tensor) -> None:
        raise LookupError("no such state")

    async with serving(model) as device:
        device.launch(
            0,
            batch(
                *((number, 0, [5]) for number in (1, 2, 3, 4)),
                pages=[(number, 0, number) for number in (1, 2, 3, 4)],
                admitted=[row(number) for number in (1, 2, 3, 4)],
                late=[1, 2, 4],
            ),
        )
        late = Late(masked=np.array([3], np.int32), masks=masks([0, 33, 49]))
        late.processors.extend([(1, prefer, [7, 7]), (0, fail, [])])
        device.sample(0, late)
        device.launch(1, batch(*((number, 1, [PENDING]) for number in (1, 2, 3, 4)), late=[2]))
        first = await device.results(0)
        device.release(0)
        device.sample(1)  # the second has ended
        second = await device.results(1)
    assert [str(error) for error in first.errors.values()] == ["no such state"] and list(first.errors) == [0]
    assert first.tokens[1:].tolist() == [32, 6, 0]
    assert second.tokens[2:].tolist() == [7, 1] and second.errors == {}
    assert threads == [model.thread]


async def test_a_part_of_a_prompt_leaves_no_trace() -> None:
    """Of a row that counts what it samples, asks for log-probabilities, and draws."""
    sampling = RowSampling(seed=0, row=2, presence_penalty=50.0, output=(9,), logprobs=0)
    async with serving(Recorder()) as device:
        device.launch(0, batch((2, 0, [5, 6]), pages=[(2, 0, 1)], admitted=[sampling], partial=[2]))
        device.sample(0)
        assert (await device.results(0)).logprobs is None, "nobody is asked for any"
        device.release(0)
        device.launch(1, batch((2, 2, [6]), counts=[1]))
        device.sample(1)
        assert (await device.results(1)).tokens.tolist() == [7], "not counted before"
        device.release(1)
        device.launch(0, batch((2, 3, [8]), counts=[2]))
        device.sample(0)
        assert (await device.results(0)).tokens.tolist() == [0], "9 was sampled before the row was given to it"


async def test_scored_rows() -> None:
    async with serving(Recorder()) as device:
        device.launch(
            0,
            batch(
                (1, 0, [3]),
                (2, 0, [5, 6, 9]),
                pages=[(1, 0, 1), (2, 0, 2)],
                admitted=[row(1), row(2)],
                scored=[Scored(index=1, targets=np.array([6, 9], np.int32), top=1)],
            ),
        )
        device.sample(0)
        results = await device.results(0)
        device.release(0)
        device.launch(1, batch((1, 1, [PENDING])))
        device.sample(1)
        assert (await device.results(1)).scores == []
    assert results.tokens.tolist() == [4, 10]
    (scores,) = results.scores
    likely = 9.0 - float(torch.tensor([9.0] + [0.0] * (VOCAB - 1)).logsumexp(0))
    assert scores.index == 1 and scores.top_ids.tolist() == [[6], [7]]
    assert scores.logprobs.tolist() == pytest.approx([likely, likely - 9.0], abs=1e-5)
    assert scores.top_logprobs.ravel().tolist() == pytest.approx([likely, likely], abs=1e-5)
