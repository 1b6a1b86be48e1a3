"""The interface behind which steps run: `Device`, and what is passed over it.

The scheduler calls it from the event loop; nothing here waits, but for `Device.results`, which awaits. Everything is
numpy: the scheduler knows no torch, and a device copies what it needs into buffers of its own.
"""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from anyio.abc import TaskStatus
from numpy.typing import NDArray

from aphoton.checks import check_int, check_ints
from aphoton.sampling import LogitsProcessor, RowSampling

__all__ = ["INT32_MAX", "PENDING", "Batch", "Device", "Ints", "Late", "Limits", "Results", "Scored", "Scores"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

INT32_MAX = 2**31 - 1
"""Tokens, positions and pages are numbered in int32."""

PENDING = -1
"""In `Batch.tokens`: this row's last sampled token, which may not have reached the host yet."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model and its device allow. Every value is checked when the struct is made.

    :ivar max_model_len: tokens in a sequence, prompt and output.
    :ivar pages: KV pages, page 0 included, which is padding and is never handed out.
    :ivar eos_token_ids: the model's own end tokens.
    :ivar dtype: of weights and KV; empty where there are none.
    :ivar kernels: what computes a step, for reports: ``native``, ``torch``, ``script``.
    """

    vocab_size: int
    max_model_len: int
    pages: int
    eos_token_ids: tuple[int, ...]
    dtype: str = ""
    kernels: str = ""

    def __post_init__(self) -> None:
        check_int("vocab_size", self.vocab_size, 1, INT32_MAX)
        check_int("max_model_len", self.max_model_len, 1, INT32_MAX)
        check_int("pages", self.pages, 2, INT32_MAX)
        ends = check_ints("eos_token_ids", self.eos_token_ids, 0, self.vocab_size - 1)
        msgspec.structs.force_setattr(self, "eos_token_ids", ends)


@dataclass(slots=True, kw_only=True)
class Scored:
    """A row whose tokens' own log-probabilities are asked for, in a launch that feeds (a part of) its prompt.

    :ivar index: of the row in the batch.
    :ivar targets: [m] ids, at most as many as the row feeds: what follows its first token, its second, ...
    :ivar top: likeliest tokens to report at each place.
    """

    index: int
    targets: Ints
    top: int


@dataclass(slots=True, kw_only=True)
class Scores:
    """What was asked for with a `Scored`.

    :ivar logprobs: [m] of the targets.
    :ivar top_ids, top_logprobs: [m, top] the likeliest tokens, best first.
    """

    index: int
    logprobs: Floats
    top_ids: Ints
    top_logprobs: Floats


@dataclass(slots=True, kw_only=True)
class Late:
    """What the sampling of a step waits for: the host's part, made when the step before has been committed.

    :ivar masked: [m] indices in the batch, each at most once.
    :ivar masks: [m, mask_words] uint32: bit t % 32 of word t // 32 says that token t may be sampled. In
        place of what the row's `RowSampling.allowed` says. What is not in `Device.masks` is copied.
    :ivar processors: (index in the batch, processor, the row's output so far).
    """

    masked: Ints
    masks: NDArray[np.uint32]
    processors: list[tuple[int, LogitsProcessor, list[int]]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Batch:
    """One launch: n rows, of which each feeds one or more tokens and gets one sampled token.

    The scheduler makes new arrays for each launch and never touches them again: they are the device's. What is in
    ``admitted`` is its sequence's: it changes only when the sequence gets a row anew, after all steps that had it.

    :ivar rows: [n] the rows, each at most once. Row 0 is padding and never here.
    :ivar starts: [n] tokens of the row whose KV is there already.
    :ivar lengths: [n] tokens that this launch feeds.
    :ivar counts: [n] tokens sampled for the row before this step: the counter of its random stream.
    :ivar tokens: [sum(lengths)] token ids row by row, or `PENDING` (only ever the single token of a decode row).
    :ivar new_pages: [k, 3] entries (row, index, page) of page tables that changed since the last launch.
    :ivar admitted: sampler state of the rows that run for the first time since they were given to their sequence.
    :ivar partial: [n] true where the row feeds a part of its prompt that is not the last: nothing is sampled for it,
        and what stands in its place in the results means nothing.
    :ivar late: [n] true where sampling takes what `Device.sample` brings. The others need not wait for that.
    :ivar scored: rows that ask for log-probabilities of what they feed.
    """

    rows: Ints
    starts: Ints
    lengths: Ints
    counts: Ints
    tokens: Ints
    new_pages: Ints
    partial: NDArray[np.bool_]
    late: NDArray[np.bool_]
    admitted: list[RowSampling] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Results:
    """What a step sampled, in the order of `Batch.rows`. A view of the slot's buffers: valid until `release`.

    :ivar tokens: [n] sampled ids.
    :ivar began, ended: when the device worked on the step, forward and sampling, in seconds on `Device.now`'s clock.
    :ivar faulty: [n] true where the logits, as the model made them, were not finite: the token means nothing.
        None: nowhere.
    :ivar barred: [n] true where they were, and what the row asks for has left no token: the one here means nothing.
        None: nowhere.
    :ivar logprobs: [n] of the chosen token, where the row asked; None when no row of the step did.
    :ivar top_ids, top_logprobs: [n, k] the likeliest tokens, best first, where it did; k the most that any asked for.
    :ivar scores: in the order of `Batch.scored`.
    :ivar errors: what `Late.processors` raised, by index in the batch: the row's token means nothing.
    """

    tokens: Ints
    began: float
    ended: float
    faulty: NDArray[np.bool_] | None = None
    barred: NDArray[np.bool_] | None = None
    logprobs: Floats | None = None
    top_ids: Ints | None = None
    top_logprobs: Floats | None = None
    scores: list[Scores] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)


class Device(Protocol):
    """Where steps run. Two slots take turns; each slot's order is launch, masks (or not), sample, results, release,
    launch, ...

    Steps run in the order of their launches. A failure of any call, or of the device later, ends the device: it is
    raised from the call or from `results`, and the device takes no further step.
    """

    limits: Limits

    def launch(self, slot: int, batch: Batch) -> None:
        """Enqueue the forward of ``batch``, or begin to: what is left follows while `results` are awaited."""

    def masks(self, slot: int, count: int) -> NDArray[np.uint32]:
        """Memory for the `Late.masks` of the step launched in ``slot``: [count, mask_words], contiguous; what is in it
        means nothing.

        Hazard: from `sample` until `release` it is the device's; and a second call may give the same.
        """

    def sample(self, slot: int, late: Late | None = None) -> None:
        """Enqueue sampling of the slot's forward, and the copy of its results to the host, if `launch` has not.

        :param late: for the rows that are `Batch.late`, but for those that have ended meanwhile: what is sampled for
            these means nothing. None when there are no others.
        """

    async def results(self, slot: int) -> Results:
        """Await the slot's results through the event loop, which gets at least one turn even when they are there."""

    def release(self, slot: int) -> None:
        """The slot's results have been read: its buffers are the device's again, until the next launch fills them."""

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Run what the device needs beside the loop (a worker thread, say), until `stop`."""

    def stop(self) -> None:
        """End `serve`, once no step is in flight. Frees the model and the KV cache."""

    def now(self) -> float:
        """Seconds on the clock that this device's times are in (virtual on ``sim``)."""
