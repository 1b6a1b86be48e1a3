"""The simulated device: steps in virtual time, tokens from a script. No torch, and nothing to wait for.

It computes a token from what stands in the KV pages, as a model does, and it executes a step late, as a GPU does. So a
page, a row or a slot that is given to somebody else too early shows as a wrong token, or as a `SimFault`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import msgspec
import numpy as np
from anyio.abc import TaskStatus
from numpy.typing import NDArray

from aphoton.checks import check_float, check_int, check_ints
from aphoton.device.base import INT32_MAX, PENDING, Batch, Late, Limits, Results, Scores
from aphoton.errors import InvalidRequest
from aphoton.sampling import RowSampling, mask_words

__all__ = ["SimCosts", "SimDevice", "SimFault", "SimModel"]

MOST_SECONDS = 1e9
MOST_VOCABULARY = 1 << 20
"""The name of each token is made when the model is loaded."""


class SimFault(RuntimeError):
    """The scheduler broke a rule of the device: something that a step in flight can touch was given away."""


class SimCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a step costs, in seconds of virtual time. Every value is checked when the struct is made.

    :ivar launch: host, to launch a forward.
    :ivar forward: device, per forward.
    :ivar forward_token: device, for each token that the forward feeds.
    :ivar sampling: device.
    :ivar copy: copy engine, of the results to the host.
    :ivar commit: host, to take the results.
    """

    launch: float = 0.3e-3
    forward: float = 2.0e-3
    forward_token: float = 0.0
    sampling: float = 0.1e-3
    copy: float = 0.05e-3
    commit: float = 0.5e-3

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_float(name, getattr(self, name), 0.0, MOST_SECONDS)


def scripted_token(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
    """The default script: a token that depends on every token before it and on the seed."""
    return hash((seed, *history)) % vocab_size


class SimModel(msgspec.Struct, frozen=True, kw_only=True):
    """A scripted model for ``Engine(SimModel(...))``. Every value is checked when the struct is made.

    :ivar script: (history, seed, vocab_size) -> token: what follows a row's tokens so far, prompt and output.
    :ivar probe: called with the name of each call of the device as it begins (``launch``, ``sample``, ``results``); it
        may raise, which is a device fault, or do anything that an app may do at that moment.
    :ivar turns: turns of the event loop that awaiting a step's results takes, per step in a cycle; each at least 1.
    """

    vocab_size: int = 1000
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = (0,)
    costs: SimCosts = SimCosts()
    script: Callable[[tuple[int, ...], int, int], int] = scripted_token
    probe: Callable[[str], None] | None = None
    turns: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        check_int("vocab_size", self.vocab_size, 1, MOST_VOCABULARY)
        check_int("max_model_len", self.max_model_len, 1, INT32_MAX)
        ends = check_ints("eos_token_ids", self.eos_token_ids, 0, self.vocab_size - 1)
        if not isinstance(self.costs, SimCosts):
            raise InvalidRequest("costs", f"must be SimCosts, not {self.costs!r:.80}")
        if not callable(self.script):
            raise InvalidRequest("script", f"must be a function, not {self.script!r:.80}")
        if self.probe is not None and not callable(self.probe):
            raise InvalidRequest("probe", f"must be a function, not {self.probe!r:.80}")
        turns = check_ints("turns", self.turns, 1)
        if not turns:
            raise InvalidRequest("turns", "must hold at least one number")
        # The caller's own lists may change after they have been checked.
        msgspec.structs.force_setattr(self, "eos_token_ids", ends)
        msgspec.structs.force_setattr(self, "turns", turns)


@dataclass(slots=True)
class _SlotState:
    """What a slot's step may touch, from its launch until its results are read."""

    batch: Batch | None = None
    pages: dict[int, set[int]] = field(default_factory=dict)  # page -> rows whose tables have it
    written: dict[int, int] = field(default_factory=dict)  # page -> row
    owners: dict[int, int] = field(default_factory=dict)  # row -> how often the row has been admitted
    began: float = 0.0
    ended: float = 0.0
    ready: float = 0.0
    sampled: bool = False
    executed: bool = False
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    barred: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    masks: dict[int, NDArray[np.uint32]] = field(default_factory=dict)  # by index in the batch
    room: NDArray[np.uint32] = field(default_factory=lambda: np.zeros((0, 0), np.uint32))  # read when it executes


class SimDevice:
    """Two slots, one compute stream, one copy engine, and a clock that only this device moves."""

    def __init__(self, model: SimModel, *, pages: int, page_size: int, max_rows: int) -> None:
        self.limits = Limits(
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            pages=pages,
            eos_token_ids=model.eos_token_ids,
            kernels="script",
        )
        self._model = model
        self._page_size = page_size
        self._tables: dict[int, dict[int, int]] = {}
        self._memory = np.full((pages, page_size), -1, np.int64)
        self._last: dict[int, int] = {}
        self._sampling: dict[int, RowSampling] = {}
        self._admissions = [0] * (max_rows + 1)
        self._slots = (_SlotState(), _SlotState())
        self._queue: list[int] = []
        self._host = 0.0
        self._compute_free = 0.0
        self._copy_free = 0.0
        self._reads = 0
        self._stopped = anyio.Event()

    # Device

    def launch(self, slot: int, batch: Batch) -> None:
        self._probe("launch")
        state, costs = self._slots[slot], self._model.costs
        if state.batch is not None:
            raise SimFault(f"slot {slot} was launched before its results were read")
        self._host += costs.launch
        for sampling in batch.admitted:
            self._admissions[sampling.row] += 1
            self._sampling[sampling.row] = sampling
            self._tables[sampling.row] = {}
        for row, index, page in batch.new_pages.tolist():
            self._tables[row][index] = page
        state.batch = batch
        state.sampled = state.executed = False
        state.tokens = np.full(len(batch.rows), -1, np.int32)
        state.barred = np.zeros(len(batch.rows), np.bool_)
        state.masks = {}
        self._note_touched(state, batch)
        self._refuse_shared(slot)
        self._refuse_wrong_targets(batch)
        state.began = max(self._host, self._compute_free)
        self._compute_free = state.began + costs.forward + costs.forward_token * len(batch.tokens)
        self._queue.append(slot)

    def masks(self, slot: int, count: int) -> NDArray[np.uint32]:
        state = self._slots[slot]
        if state.batch is None or state.sampled:
            raise SimFault(f"slot {slot} has no forward to make masks for")
        if len(state.room) < count:
            state.room = np.zeros((count, mask_words(self._model.vocab_size)), np.uint32)
        state.room[:] = 0xA5A5A5A5
        return state.room[:count]

    def sample(self, slot: int, late: Late | None = None) -> None:
        self._probe("sample")
        state, costs = self._slots[slot], self._model.costs
        if state.batch is None or state.sampled:
            raise SimFault(f"slot {slot} has no forward to sample")
        if late is not None:
            state.masks = self._checked_masks(state.batch, late, state.room)
        sampled = max(self._host, self._compute_free) + costs.sampling
        self._compute_free = state.ended = sampled
        self._copy_free = state.ready = max(sampled, self._copy_free) + costs.copy
        state.sampled = True

    async def results(self, slot: int) -> Results:
        self._probe("results")
        state = self._slots[slot]
        if not state.sampled:
            raise SimFault(f"slot {slot} was read before it was sampled")
        for _ in range(self._model.turns[self._reads % len(self._model.turns)]):
            await asyncio.sleep(0)
        self._reads += 1
        self._host = max(self._host, state.ready)
        while not state.executed:  # steps run in the order of their launches
            self._execute(self._slots[self._queue.pop(0)])
        # A scripted token is certain: its log-probability is 0, and it has no alternatives.
        assert state.batch is not None
        return Results(
            tokens=state.tokens,
            began=state.began,
            ended=state.ended,
            barred=state.barred,
            logprobs=np.zeros(len(state.tokens), np.float32),
            scores=[
                Scores(
                    index=scored.index,
                    logprobs=np.zeros(len(scored.targets), np.float32),
                    top_ids=np.zeros((len(scored.targets), 0), np.int32),
                    top_logprobs=np.zeros((len(scored.targets), 0), np.float32),
                )
                for scored in state.batch.scored
            ],
        )

    def release(self, slot: int) -> None:
        state = self._slots[slot]
        state.batch = None
        state.tokens[:] = -1  # a later read finds nothing
        self._host += self._model.costs.commit

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()

    def now(self) -> float:
        return self._host

    # What a GPU would do

    def _execute(self, state: _SlotState) -> None:
        """Write the step's tokens to the pages, and sample from what stands there."""
        batch = state.batch
        assert batch is not None
        fed = 0
        for index, row in enumerate(batch.rows.tolist()):
            start, length = int(batch.starts[index]), int(batch.lengths[index])
            tokens = batch.tokens[fed : fed + length].tolist()
            fed += length
            if tokens[0] == PENDING:
                tokens = [self._last[row]]
            table = self._tables[row]
            for position, token in enumerate(tokens, start):
                self._memory[table[position // self._page_size], position % self._page_size] = token
            if batch.partial[index]:
                self._last.pop(row, None)  # there is no token yet
                continue
            history = tuple(
                int(self._memory[table[p // self._page_size], p % self._page_size]) for p in range(start + length)
            )
            token = self._choose(history, row, int(batch.counts[index]), state.masks.get(index))
            state.barred[index] = token is None
            self._last[row] = state.tokens[index] = 0 if token is None else token
        state.executed = True

    def _choose(self, history: tuple[int, ...], row: int, count: int, mask: NDArray[np.uint32] | None) -> int | None:
        """The script's token, or the next above it, around the end, that may be sampled; None when none may."""
        sampling, size = self._sampling[row], self._model.vocab_size
        seed = sampling.seed if sampling.temperature > 0 else 0
        token = self._model.script(history, seed, size)
        banned = sampling.banned if count < sampling.min_tokens else ()
        if mask is None and sampling.allowed is None and token not in banned:
            return token
        if mask is not None:
            may = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size].astype(np.bool_)
        else:
            may = np.full(size, sampling.allowed is None)
            if sampling.allowed is not None:
                may[np.array(sampling.allowed, np.int64)] = True
        may[[one for one in banned if one < size]] = False
        allowed = np.flatnonzero(may)
        if not len(allowed):
            return None
        return int(allowed[np.searchsorted(allowed, token) % len(allowed)])

    # What the scheduler may not do

    def _note_touched(self, state: _SlotState, batch: Batch) -> None:
        state.owners = {row: self._admissions[row] for row in batch.rows.tolist()}
        state.pages, state.written = {}, {}
        for row in state.owners:
            for page in self._tables[row].values():
                state.pages.setdefault(page, set()).add(row)
        for row, start, length in zip(batch.rows.tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True):
            for index in range(start // self._page_size, (start + length - 1) // self._page_size + 1):
                state.written[self._tables[row][index]] = row

    def _refuse_shared(self, slot: int) -> None:
        """A page that is written is nobody else's, and a row is one sequence's, as far as steps not read yet go.

        A page may be read by the launch after the one that writes it: steps run in the order of their launches.
        """
        new, other = self._slots[slot], self._slots[1 - slot]
        assert new.batch is not None
        for page, row in new.written.items():
            if new.pages[page] != {row}:
                raise SimFault(f"page {page} is written for row {row} while another row of the launch has it")
        if other.batch is None:
            return
        for row, owner in new.owners.items():
            if other.owners.get(row, owner) != owner:
                raise SimFault(f"row {row} was given away while a step in flight computes it")
        for page, row in new.written.items():
            if other.pages.get(page, {row}) != {row}:
                raise SimFault(f"page {page} was given to row {row} while a step in flight has it for another")
        starts = dict(zip(new.batch.rows.tolist(), new.batch.starts.tolist(), strict=True))
        for row, index, page in new.batch.new_pages.tolist():
            fresh = index * self._page_size >= starts.get(row, 0)  # to be written, now or later: not shared
            if fresh and other.pages.get(page, {row}) != {row}:
                raise SimFault(f"page {page} was given to row {row} while a step in flight has it for another")

    def _refuse_wrong_targets(self, batch: Batch) -> None:
        begins = np.concatenate(([0], np.cumsum(batch.lengths)))
        for scored in batch.scored:
            fed = batch.tokens[begins[scored.index] : begins[scored.index + 1]]
            count = len(scored.targets)
            if not 0 < count <= len(fed) or (scored.targets[: len(fed) - 1] != fed[1 : count + 1]).any():
                raise SimFault(f"the targets of row {batch.rows[scored.index]} are not what follows its tokens")

    def _checked_masks(self, batch: Batch, late: Late, room: NDArray[np.uint32]) -> dict[int, NDArray[np.uint32]]:
        words = mask_words(self._model.vocab_size)
        if late.processors:
            raise SimFault("sim has no logits to process")
        if late.masks.shape != (len(late.masked), words) or late.masks.dtype != np.uint32:
            raise SimFault(f"masks of {late.masks.shape} {late.masks.dtype} for {len(late.masked)} rows")
        masks = dict(zip(late.masked.tolist(), late.masks, strict=True))
        if len(masks) < len(late.masked):
            raise SimFault("two masks for one row")
        for index in masks:
            if not batch.late[index] or batch.partial[index]:
                raise SimFault(f"a mask for row {batch.rows[index]}, which has none or is not sampled")
        # A GPU copies the room's later: whoever writes to it before that changes what is sampled.
        return masks if np.may_share_memory(late.masks, room) else {index: mask.copy() for index, mask in masks.items()}

    def _probe(self, call: str) -> None:
        if self._model.probe is not None:
            self._model.probe(call)
