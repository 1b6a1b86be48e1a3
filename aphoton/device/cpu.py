"""The CPU device: steps in a worker thread, so that the event loop stays live."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import anyio.to_thread
import numpy as np
import torch
from anyio.abc import TaskStatus
from numpy.typing import NDArray
from torch import Tensor

from aphoton.attention import KVCache
from aphoton.device.base import PENDING, Batch, Late, Limits, Results, Scores
from aphoton.memory import trim_memory
from aphoton.models.step import StepInput
from aphoton.sampling import mask_words
from aphoton.sampling.sampler import Sampler
from aphoton.sampling.scorer import Scorer

__all__ = ["CpuDevice", "Model"]


class Model(Protocol):
    """What computes a step: the torch decoder or the native one."""

    def forward(self, step: StepInput, kv: KVCache) -> Tensor:
        """[n, V] float32, the logits behind each row's last token."""

    def forward_scored(
        self, step: StepInput, kv: KVCache, scored: Mapping[int, int], take: Callable[[int, Tensor], None]
    ) -> Tensor:
        """The same. Besides, ``take`` is called with an index of ``scored`` and the [c, V] float32 logits behind the
        next c tokens of that row, until it has had the first ``scored[index]`` of them."""


@dataclass(slots=True)
class _SlotState:
    """A slot's step between the calls. The worker's, but for ``done``, which is the loop's."""

    batch: Batch | None = None
    logits: Tensor | None = None
    scorers: list[Scorer] = field(default_factory=list)
    began: float = 0.0
    done: asyncio.Future[Results] | None = None


class CpuDevice:
    """One worker thread takes forwards and samplings in the order in which they were launched.

    The loop only puts work on a queue and awaits a future; what the rows need from step to step (last tokens, page
    tables, sampler state) is the worker's alone.
    """

    def __init__(self, model: Model, kv: KVCache, limits: Limits, *, max_rows: int) -> None:
        self.limits = limits
        self._model: Model | None = model
        self._kv: KVCache | None = kv
        self._page_size = kv.page_size
        columns = -(-limits.max_model_len // kv.page_size)
        self._tables = np.zeros((max_rows + 1, columns), np.int32)
        self._last = np.zeros(max_rows + 1, np.int64)
        self._sampler = Sampler(max_rows=max_rows)
        self._slots = (_SlotState(), _SlotState())
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fault: Exception | None = None
        self._daemon = False  # the loop's thread ends with the program, whatever it does

    # Device: called from the loop

    def launch(self, slot: int, batch: Batch) -> None:
        state = self._slots[slot]
        self._work.put(lambda: self._forward(state, batch))

    def masks(self, slot: int, count: int) -> NDArray[np.uint32]:
        return np.empty((count, mask_words(self.limits.vocab_size)), np.uint32)

    def sample(self, slot: int, late: Late | None = None) -> None:
        state = self._slots[slot]
        assert self._loop is not None
        done: asyncio.Future[Results] = self._loop.create_future()
        state.done = done
        self._work.put(lambda: self._sample(state, late, done))

    async def results(self, slot: int) -> Results:
        done = self._slots[slot].done
        assert done is not None
        if done.done():
            await asyncio.sleep(0)
        return await done

    def release(self, slot: int) -> None:
        self._slots[slot].done = None

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._daemon = threading.current_thread().daemon
        task_status.started()
        # A limiter of its own: this thread lives as long as the engine, and must not take one of the app's places.
        try:
            await anyio.to_thread.run_sync(self._run, limiter=anyio.CapacityLimiter(1))
        finally:
            self._model = self._kv = None
            trim_memory()

    def stop(self) -> None:
        self._work.put(None)

    def now(self) -> float:
        return time.perf_counter()

    # Called in the worker

    def _run(self) -> None:
        with torch.inference_mode():
            while (work := self._next()) is not None:
                work()

    def _next(self) -> Callable[[], None] | None:
        """What to do next; None at the end. A program that ends without closing its engine waits for this thread."""
        while True:
            try:
                return self._work.get(timeout=1.0)
            except queue.Empty:
                if not threading.main_thread().is_alive() and (self._daemon or not self._loop_runs()):
                    return None

    def _loop_runs(self) -> bool:
        return self._loop is not None and self._loop.is_running()

    def _forward(self, state: _SlotState, batch: Batch) -> None:
        state.began = time.perf_counter()
        state.batch = batch
        if self._fault is not None:
            return
        try:
            assert self._model is not None and self._kv is not None
            for sampling in batch.admitted:
                self._sampler.admit(sampling)
            pages = batch.new_pages
            self._tables[pages[:, 0], pages[:, 1]] = pages[:, 2]
            if not batch.scored:
                state.logits = self._model.forward(self._input(batch), self._kv)
                return
            state.scorers = [Scorer(torch.from_numpy(scored.targets), scored.top) for scored in batch.scored]
            scorers = {scored.index: scorer for scored, scorer in zip(batch.scored, state.scorers, strict=True)}
            counts = {scored.index: len(scored.targets) for scored in batch.scored}
            state.logits = self._model.forward_scored(
                self._input(batch), self._kv, counts, lambda index, logits: scorers[index].take(logits)
            )
        except Exception as fault:
            self._fault = fault

    def _input(self, batch: Batch) -> StepInput:
        tokens = batch.tokens.astype(np.int64)
        ends = batch.lengths.cumsum() - 1
        pending = tokens[ends] == PENDING
        tokens[ends[pending]] = self._last[batch.rows[pending]]
        columns = -(-int((batch.starts + batch.lengths).max()) // self._page_size)
        return StepInput(
            tokens=torch.from_numpy(tokens),
            starts=torch.from_numpy(batch.starts),
            lengths=torch.from_numpy(batch.lengths),
            tables=torch.from_numpy(self._tables[batch.rows, :columns]),
            host_starts=batch.starts,
            host_lengths=batch.lengths,
        )

    def _sample(self, state: _SlotState, late: Late | None, done: asyncio.Future[Results]) -> None:
        results: Results | None = None
        if self._fault is None:
            try:
                results = self._sampled(state, late)
            except Exception as fault:
                self._fault = fault
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits anything any more
            self._loop.call_soon_threadsafe(_deliver, done, results, self._fault)

    def _sampled(self, state: _SlotState, late: Late | None) -> Results:
        batch = state.batch
        assert state.logits is not None and batch is not None
        # A row of which nothing is sampled is sampled as row 0, which has no state to be touched and asks for nothing.
        rows = np.where(batch.partial, np.int32(0), batch.rows) if batch.partial.any() else batch.rows
        sampled = self._sampler.sample(
            state.logits,
            rows,
            batch.counts,
            masked=None if late is None else late.masked,
            masks=None if late is None else late.masks,
            processors=() if late is None else late.processors,
        )
        state.logits = None
        scorers, state.scorers = state.scorers, []
        tokens = sampled.tokens.numpy()
        self._last[rows] = tokens
        return Results(
            tokens=tokens.astype(np.int32),
            faulty=~sampled.finite.numpy(),
            barred=sampled.barred.numpy(),
            began=state.began,
            ended=time.perf_counter(),
            logprobs=_numpy(sampled.logprobs),
            top_ids=None if sampled.top_ids is None else sampled.top_ids.numpy().astype(np.int32),
            top_logprobs=_numpy(sampled.top_logprobs),
            scores=[
                Scores(index=scored.index, logprobs=chosen.numpy(), top_ids=ids.numpy(), top_logprobs=values.numpy())
                for scored, (chosen, ids, values) in zip(
                    batch.scored, (scorer.scores() for scorer in scorers), strict=True
                )
            ],
            errors=sampled.errors,
        )


def _numpy(tensor: Tensor | None) -> NDArray[np.float32] | None:
    return None if tensor is None else tensor.numpy()


def _deliver(done: asyncio.Future[Results], results: Results | None, fault: Exception | None) -> None:
    if done.done():
        return
    if results is not None:
        done.set_result(results)
    elif fault is not None:
        done.set_exception(fault)
