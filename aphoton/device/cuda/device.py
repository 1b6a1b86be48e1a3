"""`CudaDevice`: steps on one GPU."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np
import torch
from anyio.abc import TaskStatus
from numpy.typing import NDArray
from torch import Tensor

from aphoton.attention import KVCache
from aphoton.device.base import Batch, Late, Limits, Results, Scored
from aphoton.device.cuda.clock import DeviceClock, StepEvents
from aphoton.device.cuda.graphs import DecodeGraphs, PieceGraphs, buckets, token_buckets
from aphoton.device.cuda.sampler import GREEDY, CudaSampler, StepSampling
from aphoton.device.cuda.slot import SlotBuffers
from aphoton.device.cuda.staging import Staging, aligned
from aphoton.device.cuda.streams import ALLOCATOR, return_streams, take_streams
from aphoton.device.cuda.wakeup import EventWait
from aphoton.kernels.triton.page_update import update_tables
from aphoton.memory import trim_memory
from aphoton.models import Decoder
from aphoton.models.fused import Activations, FusedDecoder, MixedInput, RowState
from aphoton.models.step import StepInput
from aphoton.sampling.params import MAX_LOGPROBS
from aphoton.sampling.scorer import Scorer
from aphoton.turns import let_go_first

if TYPE_CHECKING:  # it brings FlashInfer, which the torch kernels do without
    from aphoton.attention.flashinfer import PrefillPlanner

__all__ = ["CudaDevice"]

RING = 4
"""Steps whose events are kept apart: two in flight, and the one before them, from which their time is counted."""

HOLD = 0.2e-3
"""Seconds of enqueueing after which the loop has a turn: a step with prompts takes milliseconds."""
WARMING_UP = "Warming up (the first time, attention is compiled, which takes minutes)"


class CudaDevice:
    """Everything is enqueued from the loop, and nothing waits but `results`.

    One stream computes: steps run on it in the order of their launches, so what a step's sampling leaves by row
    (``RowState.last``) is there for the next forward. Copies have a stream for each direction, for a copy to the device
    must not queue behind the copy of results that are not there yet. Steps that feed one token per row are CUDA graphs;
    steps with prompts in them are enqueued kernel by kernel, or piece by piece, and the loop has its turns in between:
    `launch` leaves that to the next call of `results`, of whichever step. Both are sampled right behind the forward,
    but for late rows: what the host has to say of those comes with `sample`, in one copy, and the copy of the step's
    results waits for them. The next forward is launched behind that, so that it finds all tokens in the same place.
    """

    def __init__(
        self,
        decoder: FusedDecoder | Decoder,
        kv: KVCache,
        limits: Limits,
        *,
        max_rows: int,
        step_tokens: int,
        planners: "tuple[PrefillPlanner, PrefillPlanner] | None",
        device: torch.device,
        progress: Callable[[str, int, int | None], None] = lambda what, done, total: None,
    ) -> None:
        """Captures the graphs, which takes seconds, and runs a long step, so that no memory has to be taken later.

        :param decoder: the fused one, or the reference, which has no graphs and waits for the device now and then.
        :param step_tokens: that a step feeds at most.
        :param planners: of the slots, for the fused decoder.
        """
        self.limits = limits
        self._device = device
        self._decoder: FusedDecoder | Decoder | None = decoder
        self._kv: KVCache | None = kv
        self._page_size = kv.page_size
        columns = -(-limits.max_model_len // kv.page_size)
        self._rows = RowState(
            last=torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            tables=torch.zeros(max_rows + 1, columns, dtype=torch.int32, device=device),
        )
        self._tables = np.zeros((max_rows + 1, columns), np.int32)  # the same on the host, for plans
        self._sampler = CudaSampler(max_rows=max_rows, limits=limits, device=device)
        self._streams = take_streams(device)
        self._compute, self._send, self._fetch = self._streams
        self._slots = tuple(
            SlotBuffers(
                planner,
                tokens=max(step_tokens, token_buckets(step_tokens)[-1]),
                rows=max_rows,
                pages=max_rows * columns,  # a page that rows share is sent for each of them
                sampling=self._sampler.words,
                mask=self._sampler.mask_words,
                device=device,
            )
            for planner in planners or (None, None)
        )
        self._events = [StepEvents() for _ in range(RING)]
        self._serving = False
        self._pending: deque[Iterator[None]] = deque()  # launches that have not been enqueued to their ends
        self._launched = 0
        self._ended = 0.0
        self._wait = EventWait()
        self._stopped = anyio.Event()
        self._graphs: DecodeGraphs | None = None
        self._late_graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        self._activations: Activations | None = None
        self._logits = torch.zeros(max_rows, limits.vocab_size, dtype=kv.data.dtype, device=device)
        # What has been allocated and filled so far was so on another stream.
        self._compute.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.inference_mode(), torch.cuda.device(device), self._compute:
                if isinstance(decoder, FusedDecoder):
                    self._capture_all(decoder, max_rows, step_tokens, progress)
                # Behind the captures, which read from the staging: it holds zeros until then, which are padding.
                progress(WARMING_UP, 0, 1)
                self._warm_up(max(1, min(step_tokens, limits.max_model_len - 1)))
                progress(WARMING_UP, 1, 1)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._compute.synchronize()
            return_streams(device, self._streams)
            raise
        self._clock = DeviceClock(self._compute)

    # Device

    def launch(self, slot: int, batch: Batch) -> None:
        state = self._slots[slot]
        state.batch = batch
        state.events = self._events[self._launched % RING]
        self._launched += 1
        state.launched_at = time.perf_counter()
        if len(pages := batch.new_pages):
            self._tables[pages[:, 0], pages[:, 1]] = pages[:, 2]
        decodes = len(batch.tokens) == len(batch.rows) and not batch.admitted and int(batch.tokens.max()) < 0
        if not decodes or self._graphs is None:
            self._pending.append(self._enqueue(state, batch))
        elif self._pending:
            self._pending.append(self._replay_later(slot, state, batch))
        else:
            # Streams as contexts, not torch.cuda.stream and torch.cuda.device: those cost more than the launch.
            with self._compute:
                self._replay(slot, state, batch)

    def masks(self, slot: int, count: int) -> NDArray[np.uint32]:
        words = self._sampler.mask_words
        return self._slots[slot].late.room(count * words).reshape(count, words).view(np.uint32)

    def sample(self, slot: int, late: Late | None = None) -> None:
        """Enqueue the sampling of late rows: `launch` has enqueued everybody else's."""
        state = self._slots[slot]
        assert state.batch is not None
        if not state.batch.late.any():
            return
        if self._pending:  # this step, or one before it, has not been enqueued to its end
            self._pending.append(self._sample_later(slot, late))
        else:
            with torch.inference_mode(), self._compute:
                self._sample_late(slot, late)

    async def results(self, slot: int) -> Results:
        state = self._slots[slot]
        batch, events = state.batch, state.events
        assert batch is not None and events is not None
        while self._pending:
            await let_go_first()
            self._go_on()
        # It is next from when the step before it ended, or else from when it was launched.
        since = max(state.launched_at, self._ended)
        await self._wait.wait(events.copied, state.kind, since)
        began, ended = self._clock.interval(events, state.launched_at)
        self._ended = ended
        self._wait.learn(state.kind, max(0.0, ended - since))
        return state.results(began, ended)

    def release(self, slot: int) -> None:
        self._slots[slot].clear()

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        # cuBLAS sets itself up for each thread: for the loop's now, and not in the first step.
        with torch.inference_mode(), self._compute:
            self._logits[:1].zero_()  # which makes the device's context this thread's: cuBLAS warns without one
            torch.mm(self._logits[:1], self._logits[:1].t())
        self._serving = True
        task_status.started()
        try:
            await self._stopped.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._free, limiter=anyio.CapacityLimiter(1))

    def stop(self) -> None:
        self._stopped.set()
        if not self._serving:  # it was loaded and then not wanted
            self._free()

    def now(self) -> float:
        return time.perf_counter()

    # Steps

    def _go_on(self) -> None:
        """Enqueue more of what has been launched, until all is or the loop should have a turn."""
        until = time.perf_counter() + HOLD
        with torch.inference_mode(), self._compute:
            while self._pending:
                for _ in self._pending[0]:
                    if time.perf_counter() >= until:
                        return
                self._pending.popleft()

    def _replay_later(self, slot: int, state: SlotBuffers, batch: Batch) -> Iterator[None]:
        """A decode step behind a launch that has not been enqueued to its end."""
        self._replay(slot, state, batch)
        yield

    def _sample_later(self, slot: int, late: Late | None) -> Iterator[None]:
        """Late sampling behind a launch that has not been enqueued to its end."""
        self._sample_late(slot, late)
        yield

    def _sample_late(self, slot: int, late: Late | None) -> None:
        """Sample the late rows, over what their step's launch has left for them, and end the step.

        The stream's order makes that right: the logits are this step's until the next launch, and what is left by row
        (last tokens, counts for penalties) is there before the next forward.
        """
        state = self._slots[slot]
        batch, logits, sampling, events = state.batch, state.logits, state.sampling, state.events
        assert batch is not None and logits is not None and sampling is not None and events is not None
        if late is not None:
            graphs = None if late.processors or logits.data_ptr() != self._logits.data_ptr() else self._late_graphs
            state.late.begin()
            if graphs is None:
                rows = self._sampler.stage_late(batch, late, state.late)
                self._to_device(state.late, events)
                state.errors = self._sampler.sample_late(rows, logits, self._rows.last, state)
            else:
                size = graphs.size(len(late.masked))
                self._sampler.write_late(batch, late, state.late, size)
                self._to_device(state.late, events)
                graphs.replay(slot, size)
        self._sampler.logprobs(sampling, logits, state)
        state.logits = state.sampling = None
        self._launched_all(state)

    def _forwarded(self, state: SlotBuffers, batch: Batch, sampling: StepSampling, logits: Tensor) -> None:
        """The forward is enqueued and everybody has been sampled who could be: end the step, or wait for `sample`."""
        if batch.late.any():
            state.logits, state.sampling = logits, sampling
        else:
            self._sampler.logprobs(sampling, logits, state)
            self._launched_all(state)

    def _launched_all(self, state: SlotBuffers) -> None:
        """The step is enqueued: behind it, the copy of what it samples."""
        assert state.events is not None
        state.events.ended.record(self._compute)
        self._fetch.wait_event(state.events.ended)
        with self._fetch:
            state.fetch()
            state.events.copied.record(self._fetch)

    def _replay(self, slot: int, state: SlotBuffers, batch: Batch) -> None:
        """A decode step, as a graph. Whatever varies is in the staging, at places that depend on its size alone."""
        assert self._graphs is not None and state.events is not None
        count = len(batch.rows)
        size = self._graphs.size(count)
        assert len(batch.new_pages) <= size
        # The arrays and sizes of `_capture`: its graph reads them there.
        staging = state.staging
        staging.begin()
        staging.write(batch.rows, size)
        staging.write(batch.starts, size)
        counts = staging.put(batch.counts, size)
        staging.write(batch.new_pages, 3 * size)
        sampling = self._sampler.prepare(batch, size, state.staging)
        self._to_device(state.staging, state.events)
        state.events.began.record(self._compute)
        self._graphs.replay(slot, size)
        state.kind, state.size = size, size
        if sampling is GREEDY:
            self._forwarded(state, batch, sampling, self._logits)
            return
        with torch.inference_mode():
            logits = self._logits[:size]
            self._sampler.sample(sampling, logits, counts, self._rows.last, state)
            self._forwarded(state, batch, sampling, logits)

    def _capture_all(
        self, decoder: FusedDecoder, max_rows: int, tokens: int, progress: Callable[[str, int, int | None], None]
    ) -> None:
        pool = torch.cuda.graph_pool_handle()
        self._graphs = DecodeGraphs(
            buckets(max_rows),
            self._capture,
            pool,
            lambda done, total: progress("Capturing CUDA graphs of decode steps", done, total),
        )
        self._late_graphs = DecodeGraphs(
            buckets(max_rows),
            self._capture_late,
            pool,
            lambda done, total: progress("Capturing CUDA graphs of constrained sampling", done, total),
        )
        sizes = token_buckets(tokens)
        self._activations = decoder.activations(sizes[-1])
        self._activations.clear()  # captures, and padding later, compute on what attention has not written
        self._inputs = torch.zeros(3 * sizes[-1], dtype=torch.int32, device=self._device)
        self._pieces = PieceGraphs(
            sizes,
            decoder.pieces,
            self._capture_piece,
            pool,
            lambda done, total: progress("Capturing CUDA graphs of prefills", done, total),
        )

    def _capture_piece(self, size: int, piece: int) -> None:
        """Enqueue a piece of a step with prompts. It is of either slot: they follow each other on one stream."""
        assert isinstance(self._decoder, FusedDecoder)
        tokens, positions, rows = self._inputs[: 3 * size].view(3, size)
        step = MixedInput(tokens=tokens, positions=positions, rows=rows, ends=tokens)
        assert self._activations is not None
        self._decoder.piece(piece, step, self._rows, self._activations.first(size))

    def _capture(self, slot: int, size: int) -> None:
        """Enqueue a decode step of ``size`` rows for the graphs, sampled greedily."""
        state, none = self._slots[slot], np.zeros(0, np.int32)
        state.staging.begin()
        rows, starts, _, new_pages = (state.staging.put(none, many) for many in (size, size, size, 3 * size))
        assert isinstance(self._decoder, FusedDecoder)
        update_tables(self._rows.tables, new_pages.view(size, 3), size)
        self._decoder.decode(rows, starts, self._rows, self._logits[:size])
        state.size = size
        self._sampler.greedy(self._logits[:size], rows, self._rows.last, state)

    def _capture_late(self, slot: int, size: int) -> None:
        """Enqueue the late sampling of ``size`` rows of a decode step for the graphs."""
        state = self._slots[slot]
        state.late.begin()
        rows = self._sampler.late_padding(state.late, size)
        self._sampler.sample_late(rows, self._logits, self._rows.last, state)

    def _enqueue(self, state: SlotBuffers, batch: Batch) -> Iterator[None]:
        """A step with prompts in it, piece by piece or kernel by kernel. Yields now and then."""
        assert self._decoder is not None and state.events is not None
        starts, lengths = batch.starts, batch.lengths
        ends = lengths.cumsum(dtype=np.int32)
        token_rows = np.repeat(batch.rows, lengths)
        positions = np.arange(len(batch.tokens), dtype=np.int32) - np.repeat(ends - lengths - starts, lengths)
        counts = -(-(starts + lengths) // self._page_size)
        columns = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        size = None if self._pieces is None else self._pieces.size(len(batch.tokens))
        tokens = np.zeros((3, size or aligned(len(batch.tokens))), np.int32)
        tokens[:, : len(batch.tokens)] = batch.tokens, positions, token_rows
        yield
        staging = state.staging
        staging.begin()
        inputs = staging.put(tokens)
        step_ends = staging.put(ends - 1)
        rows, row_counts = staging.put(batch.rows), staging.put(batch.counts)
        new_pages = staging.put(batch.new_pages)
        pages = staging.put(self._tables[np.repeat(batch.rows, counts), columns])
        admitted = self._sampler.stage(batch.admitted, staging)
        sampling = self._sampler.prepare(batch, len(batch.rows), staging)
        scorers = [Scorer(staging.put(scored.targets), scored.top) for scored in batch.scored]
        yield
        self._to_device(state.staging, state.events)
        state.events.began.record(self._compute)
        if len(new_pages):
            update_tables(self._rows.tables, new_pages.view(-1, 3), len(batch.new_pages))
        if admitted is not None:
            self._sampler.admit(*admitted, batch.admitted)
        yield
        of_tokens = inputs.view(3, -1)[:, : len(batch.tokens)]
        step = MixedInput(tokens=of_tokens[0], positions=of_tokens[1], rows=of_tokens[2], ends=step_ends)
        if not isinstance(self._decoder, FusedDecoder):
            logits = self._reference(step, batch, rows, int(counts.max()), scorers)
        else:
            assert state.planner is not None
            state.planner.plan(starts, lengths, pages)
            scored = [
                (begin, begin + len(asked.targets), scorer.take)
                for asked, scorer in zip(batch.scored, scorers, strict=True)
                for begin in (int(ends[asked.index] - lengths[asked.index]),)
            ]
            yield
            if size is None:
                logits = yield from self._decoder.mixed(step, self._rows, state.planner, scored=scored)
            else:
                assert self._activations is not None
                self._inputs[: inputs.numel()].copy_(inputs)
                logits = yield from self._decoder.mixed(
                    step,
                    self._rows,
                    state.planner,
                    self._activations.first(size),
                    partial(self._replay_piece, size),
                    scored,
                )
        # Steps with prompts take as long as they have tokens, about.
        state.kind, state.size = -len(batch.tokens).bit_length(), len(batch.rows)
        state.scores = [scorer.scores() for scorer in scorers]
        if sampling.drawn is None:
            self._sampler.greedy(logits, rows, self._rows.last, state)
        self._sampler.sample(sampling, logits, row_counts, self._rows.last, state)
        self._forwarded(state, batch, sampling, logits)

    def _replay_piece(self, size: int, piece: int) -> None:
        assert self._pieces is not None
        self._pieces.replay(size, piece)

    def _reference(self, step: MixedInput, batch: Batch, rows: Tensor, columns: int, scorers: list[Scorer]) -> Tensor:
        """The same by the reference decoder."""
        assert isinstance(self._decoder, Decoder) and self._kv is not None
        tokens = torch.where(step.tokens < 0, self._rows.last[step.rows], step.tokens)
        given = StepInput(
            tokens=tokens.long(),
            starts=step.ends,  # the reference plans on the host
            lengths=step.ends,
            tables=self._rows.tables[rows, :columns],
            host_starts=batch.starts,
            host_lengths=batch.lengths,
        )
        if not scorers:
            return self._decoder.forward(given, self._kv)
        takers = {asked.index: scorer.take for asked, scorer in zip(batch.scored, scorers, strict=True)}
        counts = {asked.index: len(asked.targets) for asked in batch.scored}
        return self._decoder.forward_scored(given, self._kv, counts, lambda index, logits: takers[index](logits))

    def _to_device(self, staging: Staging, events: StepEvents) -> None:
        """Not on the compute stream: it is sent while the step before runs, or this one's forward."""
        with self._send:
            staging.send()
            events.sent.record(self._send)
        self._compute.wait_event(events.sent)

    def _warm_up(self, longest: int) -> None:
        """A long step and a short one, on the padding row, by either slot: kernels are compiled, memory is taken."""
        none = np.zeros(0, np.int32)
        for state, tokens in zip(self._slots, (longest, 1), strict=True):
            state.events = self._events[0]
            batch = Batch(
                rows=np.zeros(1, np.int32),
                starts=np.zeros(1, np.int32),
                lengths=np.full(1, tokens, np.int32),
                counts=np.zeros(1, np.int32),
                tokens=np.zeros(tokens, np.int32),
                new_pages=none.reshape(0, 3),
                partial=np.zeros(1, np.bool_),
                late=np.zeros(1, np.bool_),
                # What is reported of every token of the long one is the most that can be asked for, too.
                scored=[Scored(index=0, targets=np.zeros(tokens, np.int32), top=MAX_LOGPROBS)] if tokens > 1 else [],
            )
            for _ in self._enqueue(state, batch):
                pass
            self._compute.synchronize()
            state.clear()
        self._sampler.warm_up(self._logits)
        self._compute.synchronize()

    def _free(self) -> None:
        """Let the model and the cache go, once the device is done with them."""
        if self._decoder is None:
            return
        with contextlib.suppress(RuntimeError):  # it is what ended the engine, and has been told
            for stream in self._streams:
                stream.synchronize()
        self._graphs = self._late_graphs = self._pieces = self._decoder = self._kv = self._activations = None
        self._pending.clear()
        self._slots = ()
        # The engine holds a method of this object, for the time.
        del self._rows, self._sampler, self._logits
        return_streams(self._device, self._streams)
        with contextlib.suppress(RuntimeError), ALLOCATOR:
            torch.cuda.empty_cache()
        trim_memory()
