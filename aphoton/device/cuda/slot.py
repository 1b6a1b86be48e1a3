"""`SlotBuffers`: what one slot's steps use on the host and on the device."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aphoton.device.base import Batch, Results, Scores
from aphoton.device.cuda.clock import StepEvents
from aphoton.device.cuda.staging import ALIGNED, Staging

if TYPE_CHECKING:
    from aphoton.attention.flashinfer import PrefillPlanner  # it brings FlashInfer, which the torch kernels do without
    from aphoton.device.cuda.sampler import StepSampling

__all__ = ["SlotBuffers"]


class SlotBuffers:
    """A slot's buffers. Hazard: from a launch until `clear` they are that step's, pinned memory included.

    :ivar tokens, finite: [size] int32 on the device, what the step samples, and whether its logits were finite.
    :ivar extra: log-probabilities on the device, of a step that was asked for them: those of the chosen tokens, and
        perhaps ids and log-probabilities of the likeliest.
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
        """:param sampling: int32 values that the sampler may send for each row that begins.
        :param mask: int32 values of a row's mask.
        """
        self.planner = planner
        # Three values for each token and a target where it is scored; ten for each row, and where a scored one begins.
        size = 4 * tokens + 10 * rows + 4 * pages + rows * (sampling + 2 * ALIGNED) + 16 * ALIGNED
        self.staging = Staging(size, device)
        self.late = Staging(rows * (4 + mask) + 8 * ALIGNED, device)
        self._sampled = torch.zeros(2 * rows, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(2 * rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = self._pinned.numpy()
        self.size = rows
        self.kind: int | None = None
        self.launched_at = 0.0
        self.batch: Batch | None = None
        self.events: StepEvents | None = None
        self.extra: tuple[Tensor, ...] | None = None
        self.scores: list[tuple[Tensor, Tensor, Tensor]] = []
        self.logits: Tensor | None = None
        self.sampling: StepSampling | None = None
        self.errors: dict[int, Exception] = {}
        self._fetched: tuple[Tensor, ...] | None = None
        self._fetched_scores: list[tuple[Tensor, ...]] = []

    @property
    def tokens(self) -> Tensor:
        return self._sampled[: self.size]

    @property
    def finite(self) -> Tensor:
        return self._sampled[self.size : 2 * self.size]

    def fetch(self) -> None:
        """Enqueue the copy of what was sampled to the host, on the current stream, behind the step."""
        self._pinned[: 2 * self.size].copy_(self._sampled[: 2 * self.size], non_blocking=True)
        if self.extra is not None:
            self._fetched = tuple(_pinned_copy(tensor) for tensor in self.extra)
        self._fetched_scores = [tuple(_pinned_copy(tensor) for tensor in scores) for scores in self.scores]

    def results(self, began: float, ended: float) -> Results:
        """What has been fetched."""
        assert self.batch is not None
        count = len(self.batch.rows)
        chosen, ids, values = (*(t[:count].numpy() for t in self._fetched or ()), None, None, None)[:3]
        return Results(
            tokens=self._host[:count],
            faulty=self._host[self.size : self.size + count] == 0,
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

    def clear(self) -> None:
        """The results have been read: everything is the next step's."""
        self.batch = self.events = self.extra = self._fetched = self.logits = self.sampling = None
        self.scores, self._fetched_scores, self.errors = [], [], {}


def _pinned_copy(tensor: Tensor) -> Tensor:
    # The compute stream must not use its memory again before this stream has read it.
    tensor.record_stream(torch.cuda.current_stream())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
