"""`SlotBuffers`: what one slot's steps use on the host and on the device."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aphoton.device.base import Batch, Floats, Ints, Results, Scores
from aphoton.device.cuda.clock import StepEvents
from aphoton.device.cuda.staging import ALIGNED, Staging, aligned
from aphoton.sampling.params import MAX_LOGPROBS

if TYPE_CHECKING:
    from aphoton.attention.flashinfer import PrefillPlanner  # it brings FlashInfer, which the torch kernels do without
    from aphoton.device.cuda.sampler import StepSampling

__all__ = ["SlotBuffers"]

REPORT = 1 + 2 * MAX_LOGPROBS
"""int32 values of a row's log-probabilities: the chosen token's, ids of the likeliest, and theirs."""


class SlotBuffers:
    """A slot's buffers. Hazard: from a launch until `clear` they are that step's, pinned memory included.

    :ivar tokens, finite: [size] int32 on the device: what the step samples; and 1, or 0 where the logits were not
        finite, or -1 where rules have left none that is. They begin at the same places, whatever the size.
    :ivar scores: of the rows that are scored, on the device: log-probabilities, and ids and those of the likeliest.
    :ivar logits, sampling: of a step with late rows, until these have been sampled. Hazard: decode steps of both slots
        have one buffer of logits, so that must be enqueued before the next launch is.
    :ivar late: where what late rows wait for is sent.
    :ivar errors: what processors raised.
    :ivar kind: steps of one kind take about as long.
    """

    def __init__(
        self,
        planner: "PrefillPlanner | None",
        *,
        tokens: int,
        rows: int,
        pages: int,
        sampling: int,
        mask: int,
        device: torch.device,
    ) -> None:
        """:param pages: of all rows together. Each takes 16 bytes, pinned and on the device.
        :param sampling: int32 values that the sampler may send for each row that begins.
        :param mask: int32 values of a row's mask.
        """
        self.planner = planner
        # For each token three values, and a target where it is scored; for each row eleven.
        size = 4 * tokens + 11 * rows + 4 * pages + rows * (sampling + 2 * ALIGNED) + 17 * ALIGNED
        self.staging = Staging(size, device)
        self.late = Staging(rows * (4 + mask) + 8 * ALIGNED, device)
        self._finite = aligned(rows)
        self._sampled = torch.zeros(self._finite + rows, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(self._finite + rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = self._pinned.numpy()
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}  # of so many rows, to be copied
        self.size = rows
        self.kind: int | None = None
        self.launched_at = 0.0
        self.batch: Batch | None = None
        self.events: StepEvents | None = None
        self._reports = torch.zeros(rows * REPORT, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._report: Tensor | None = None
        self._reported = np.zeros(0, np.int32)
        self.scores: list[tuple[Tensor, Tensor, Tensor]] = []
        self.logits: Tensor | None = None
        self.sampling: StepSampling | None = None
        self.errors: dict[int, Exception] = {}
        self._fetched_scores: list[tuple[Tensor, ...]] = []

    @property
    def tokens(self) -> Tensor:
        return self._sampled[: self.size]

    @property
    def finite(self) -> Tensor:
        return self._sampled[self._finite : self._finite + self.size]

    def report(self, places: NDArray[np.int32], logprobs: tuple[Tensor, ...]) -> None:
        """Let `fetch` bring log-probabilities of some rows.

        :param places: [m] in the batch.
        :param logprobs: [m] float32 of the chosen tokens, and perhaps [m, k] int32 and [m, k] float32 of the likeliest.
        """
        # Held until `clear`, so that its memory is not used again before the copy, on another stream, has read it.
        self._report = torch.cat([part.view(len(places), -1).view(torch.int32) for part in logprobs], dim=1)
        self._reported = places

    def fetch(self) -> None:
        """Enqueue the copy of what was sampled to the host, on the current stream, behind the step."""
        parts = self._parts.get(self.size)
        if parts is None:
            end = self._finite + self.size
            parts = self._parts[self.size] = self._pinned[:end], self._sampled[:end]
        parts[0].copy_(parts[1], non_blocking=True)
        if self._report is not None:
            self._reports[: self._report.numel()].copy_(self._report.view(-1), non_blocking=True)
        self._fetched_scores = [tuple(_pinned_copy(tensor) for tensor in scores) for scores in self.scores]

    def results(self, began: float, ended: float) -> Results:
        """What has been fetched."""
        assert self.batch is not None
        count = len(self.batch.rows)
        finite = self._host[self._finite : self._finite + count]
        sound = bool((finite == 1).all())
        chosen, ids, values = self._logprobs(count)
        return Results(
            tokens=self._host[:count],
            faulty=None if sound else finite == 0,
            barred=None if sound else finite < 0,
            began=began,
            ended=ended,
            logprobs=chosen,
            top_ids=ids,
            top_logprobs=values,
            scores=[
                Scores(index=scored.index, logprobs=own.numpy(), top_ids=top.numpy(), top_logprobs=likeliest.numpy())
                for scored, (own, top, likeliest) in zip(self.batch.scored, self._fetched_scores, strict=True)
            ],
            errors=self.errors,
        )

    def _logprobs(self, count: int) -> tuple[Floats | None, Ints | None, Floats | None]:
        """What has been reported, as arrays of all rows of the step."""
        if self._report is None:
            return None, None, None
        many, width = self._report.shape
        packed = np.zeros((count, width), np.int32)
        packed[self._reported] = self._reports[: many * width].view(many, width).numpy()
        chosen = packed[:, 0].view(np.float32)
        if width == 1:
            return chosen, None, None
        top = (width - 1) // 2
        return chosen, packed[:, 1 : 1 + top], packed[:, 1 + top :].view(np.float32)

    def clear(self) -> None:
        """The results have been read: everything is the next step's."""
        self.batch = self.events = self._report = self.logits = self.sampling = None
        self.scores, self._fetched_scores, self.errors = [], [], {}


def _pinned_copy(tensor: Tensor) -> Tensor:
    # The compute stream must not use its memory again before this stream has read it.
    tensor.record_stream(torch.cuda.current_stream())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
