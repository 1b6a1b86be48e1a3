"""`CudaSampler`: from logits to tokens, on the device."""

from asyncio import CancelledError
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aphoton.device.base import Batch, Late, Limits
from aphoton.device.cuda.slot import SlotBuffers
from aphoton.device.cuda.staging import Staging, aligned
from aphoton.kernels.triton.argmax import argmax, argmax_scratch
from aphoton.kernels.triton.rules import adjust
from aphoton.kernels.triton.sample import sample, sample_ruled
from aphoton.kernels.triton.sampler_state import SamplerState
from aphoton.sampling import LogitsProcessor, RowSampling
from aphoton.sampling.params import MAX_LOGPROBS, MAX_STOPS
from aphoton.sampling.processor import process, processor_error
from aphoton.sampling.scorer import logprobs

__all__ = ["GREEDY", "CudaSampler", "LateRows", "StepSampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling:
    """What a step takes beside `CudaSampler.greedy`. Tensors are int32, on the device.

    :ivar drawn: [n] the rows, 0 in place of those that something else samples; None when nothing is drawn.
    :ivar ruled: places in the batch, rows and counts of those whose own rules change their logits.
    :ivar asking: places of the rows that ask for log-probabilities, on the host and on the device.
    :ivar logprobs: alternatives, the most that any of these asks for.
    """

    drawn: Tensor | None = None
    ruled: tuple[Tensor, Tensor, Tensor] | None = None
    asking: tuple[NDArray[np.int32], Tensor] | None = None
    logprobs: int = 0


GREEDY = StepSampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRows:
    """What a step samples late: m rows, as int32 tensors on the device.

    :ivar many: m, with padding: row 0.
    :ivar places, rows, counts: [m or more] in the batch, on the engine, tokens sampled before.
    :ivar masked: [m or more] which of the masks a row has; -1: none.
    :ivar masks: [k * mask_words] packed; None when there are none.
    :ivar processors: (index among the m, index in the batch, processor, output so far).
    """

    many: int
    places: Tensor
    rows: Tensor
    counts: Tensor
    masked: Tensor
    masks: Tensor | None
    processors: list[tuple[int, int, LogitsProcessor, list[int]]]


class CudaSampler:
    """The rows' sampler state, on the device for the draw and on the host for the choice of kernel.

    Most steps are greedy, and their sampler is part of the step's graph. Behind that, rows that draw or must not end
    yet are sampled again by a kernel that knows it all; rows with rules of their own (bias, allowed ids, penalties),
    and late ones, by another pair of kernels: in decode steps late ones have a graph of that, of about as many rows as
    there are. Each overwrites what came before.

    A row of which nothing is sampled yet, as its prompt goes on, may get a token in `greedy`: it is never read, for a
    prompt's last part has its own sampling before a token of the row is fed. No other kernel has it.
    """

    def __init__(self, *, max_rows: int, limits: Limits, device: torch.device) -> None:
        self._scratch = argmax_scratch(max_rows, limits.vocab_size, device)
        max_banned = MAX_STOPS + len(limits.eos_token_ids)
        self._state = SamplerState(max_rows, max_banned, limits.vocab_size, device)
        self._special = np.zeros(max_rows + 1, np.int8)  # 1: only `_min_tokens`; 2: any other of what is below
        self._draws = np.zeros(max_rows + 1, np.bool_)
        self._ruled = np.zeros(max_rows + 1, np.bool_)
        self._logprobs = np.full(max_rows + 1, -1, np.int32)
        self._min_tokens = np.zeros(max_rows + 1, np.int32)

    @property
    def words(self) -> int:
        """int32 values that are sent for a row that begins."""
        return 1 + self._state.data.shape[1]

    @property
    def mask_words(self) -> int:
        """int32 values of a row's mask."""
        return self._state.mask_words

    def stage(self, admitted: list[RowSampling], staging: Staging) -> tuple[Tensor, Tensor] | None:
        """Pack the state of rows that begin; what `admit` takes, once it has been sent."""
        if not admitted:
            return None
        rows = np.array([sampling.row for sampling in admitted], np.int32)
        self._draws[rows] = [sampling.temperature > 0 for sampling in admitted]
        self._ruled[rows] = [sampling.ruled for sampling in admitted]
        self._min_tokens[rows] = [sampling.min_tokens for sampling in admitted]
        self._logprobs[rows] = [-1 if s.logprobs is None else s.logprobs for s in admitted]
        others = self._draws[rows] | self._ruled[rows] | (self._logprobs[rows] >= 0)
        self._special[rows] = np.where(others, 2, self._min_tokens[rows] > 0)
        return staging.put(rows), staging.put(self._state.records(admitted))

    def admit(self, rows: Tensor, state: Tensor, admitted: list[RowSampling]) -> None:
        """Enqueue the update of the rows' state.

        :param admitted: as given to `stage`.
        """
        self._state.data.index_copy_(0, rows.long(), state.view(len(rows), -1))
        self._state.admit_rules(admitted)

    def prepare(self, batch: Batch, size: int, staging: Staging) -> StepSampling:
        """Choose the kernels of a step, and pack what they take beside rows and counts.

        :param size: of the batch, with its padding.
        """
        rows, counts = batch.rows, batch.counts
        special = self._special[rows].max()
        if not special or (special == 1 and not (counts < self._min_tokens[rows]).any()):
            return GREEDY
        # Row 0 has no state and asks for nothing: it stands for a row that is not sampled now, or not by this kernel.
        now = np.where(batch.partial | batch.late, np.int32(0), rows)
        ruled = self._ruled[now]
        plain = np.where(ruled, np.int32(0), now)
        draws = bool((self._draws[plain] | (counts < self._min_tokens[plain])).any())
        places = np.flatnonzero(ruled).astype(np.int32)
        wanted = self._logprobs[np.where(batch.partial, np.int32(0), rows)]
        asking = np.flatnonzero(wanted >= 0).astype(np.int32)
        if not (draws or len(places) or len(asking)):  # they are late, or their prompts go on
            return GREEDY
        return StepSampling(
            drawn=staging.put(plain, size) if draws else None,
            ruled=(staging.put(places), staging.put(rows[places]), staging.put(counts[places]))
            if len(places)
            else None,
            asking=(asking, staging.put(asking)) if len(asking) else None,
            logprobs=int(wanted.max()) if len(asking) else 0,
        )

    def greedy(self, logits: Tensor, rows: Tensor, last: Tensor, slot: SlotBuffers) -> None:
        """Enqueue the likeliest token of each row."""
        argmax(logits, rows, last, slot.tokens, slot.finite, self._scratch)

    def sample(self, step: StepSampling, logits: Tensor, counts: Tensor, last: Tensor, slot: SlotBuffers) -> None:
        """Enqueue what the step takes beside `greedy`, but for late rows and log-probabilities.

        Where anything is drawn, `greedy` need not come before: that kernel samples everybody.
        """
        if step.drawn is not None:
            sample(logits, step.drawn, counts, self._state, last, slot.tokens, slot.finite)
        if step.ruled is not None:
            adjust(logits, *step.ruled, None, None, self._state, many=len(step.ruled[0]))
            sample_ruled(*step.ruled, self._state, last, slot.tokens, slot.finite, many=len(step.ruled[0]))

    def stage_late(self, batch: Batch, late: Late, staging: Staging) -> LateRows:
        """Pack what `sample_late` takes."""
        places = late.masked
        masked: NDArray[np.int32] = np.arange(len(places), dtype=np.int32)
        if late.processors:
            others = np.setdiff1d(np.array([index for index, _, _ in late.processors], np.int32), places)
            places = np.concatenate((places, others))
            masked = np.concatenate((masked, np.full(len(others), -1, np.int32)))
        at = {place: index for index, place in enumerate(places.tolist())} if late.processors else {}
        processors = [(at[index], index, processor, output) for index, processor, output in late.processors]
        masks = late.masks.view(np.int32) if len(late.masks) else None
        many = len(places)
        return self._late_rows(_packed(batch, places, masked, many), masks, processors, staging, many)

    def write_late(self, batch: Batch, late: Late, staging: Staging, size: int) -> None:
        """Pack what the graph of ``size`` rows takes, in the order of `_late_rows`. It has no processors."""
        staging.write(late.masks.view(np.int32), size * self.mask_words)
        staging.write(_packed(batch, late.masked, np.arange(len(late.masked), dtype=np.int32), size))

    def late_padding(self, staging: Staging, size: int) -> LateRows:
        """What a graph of ``size`` rows is captured with: nobody is late."""
        masks = np.zeros((0, self.mask_words), np.int32)
        return self._late_rows(np.zeros((4, aligned(size)), np.int32), masks, [], staging, size)

    def _late_rows(
        self,
        packed: NDArray[np.int32],
        masks: NDArray[np.int32] | None,
        processors: list[tuple[int, int, LogitsProcessor, list[int]]],
        staging: Staging,
        size: int,
    ) -> LateRows:
        # The masks first, and nothing before them: they may be there already (`CudaDevice.masks`).
        sent_masks = None if masks is None else staging.put(masks, size * self.mask_words)
        places, rows, counts, masked = staging.put(packed).view(packed.shape).unbind()
        return LateRows(
            many=size,
            places=places,
            rows=rows,
            counts=counts,
            masked=masked,
            masks=sent_masks,
            processors=processors,
        )

    def sample_late(self, late: LateRows, logits: Tensor, last: Tensor, slot: SlotBuffers) -> dict[int, Exception]:
        """Enqueue the sampling of late rows, over what `greedy` has left for them. What processors raise, by index."""
        rows = late.places, late.rows, late.counts
        masks = late.masked, late.masks
        errors: dict[int, Exception] = {}
        adjust(logits, *rows, *masks, self._state, many=late.many, hard=not late.processors)
        if late.processors:
            for at, index, processor, output in late.processors:
                try:
                    process(processor, output, self._state.adjusted[at])
                except (
                    Exception,
                    CancelledError,
                    GeneratorExit,
                ) as error:  # others may be meant for the loop
                    errors[index] = processor_error(error)
            adjust(logits, *rows, *masks, self._state, many=late.many, soft=False)
        sample_ruled(*rows, self._state, last, slot.tokens, slot.finite, many=late.many)
        return errors

    def logprobs(self, step: StepSampling, logits: Tensor, slot: SlotBuffers) -> None:
        """Enqueue the log-probabilities of what has been sampled, for the rows that ask."""
        if step.asking is not None:
            places, sent = step.asking
            slot.report(places, logprobs(logits[sent], slot.tokens[sent], step.logprobs))

    def warm_up(self, logits: Tensor) -> None:
        """Enqueue all that a step may ask for, of the padding row, so that nothing is compiled and no memory is taken
        later."""
        rows = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        last, tokens = torch.zeros_like(rows), torch.zeros_like(rows)
        masks = torch.zeros(1, self.mask_words, dtype=torch.int32, device=logits.device)
        finite = torch.zeros_like(rows)
        # Places from 0 on: all rows would write to one.
        places = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        sample(logits, rows, rows, self._state, last, tokens, finite)
        adjust(logits, places, rows, rows, None, None, self._state, many=len(rows), hard=False)
        adjust(logits, places, rows, rows, rows, masks, self._state, many=len(rows), soft=False)
        adjust(logits, places, rows, rows, None, None, self._state, many=len(rows))
        sample_ruled(places, rows, rows, self._state, last, tokens, finite, many=len(rows))
        # Steps with prompts have logits of their own beside those that are looked at.
        logits = logits.clone()
        logprobs(logits[places], tokens[places], MAX_LOGPROBS)


def _packed(batch: Batch, places: NDArray[np.int32], masked: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """[4, size or a little more] places, rows, counts, and which of the masks they have."""
    assert batch.late[places].all(), "only what was launched as late is sampled late: it would be counted twice"
    many = len(places)
    packed = np.zeros((4, aligned(size)), np.int32)
    packed[0, :many], packed[1, :many], packed[2, :many] = places, batch.rows[places], batch.counts[places]
    packed[3, :many] = masked
    return packed
