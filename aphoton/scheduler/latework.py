"""`LateWork`: what sampling waits for, made on the host when the step before has been committed."""

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aphoton.device.base import Device, Late
from aphoton.sampling import QUICK, Masker, fill_all, fill_quick
from aphoton.scheduler.scheduler import Scheduler
from aphoton.scheduler.step import Step

__all__ = ["LateWork"]


class LateWork:
    """Makes the `Late` of a step, from the state as of the step before."""

    def __init__(self, scheduler: Scheduler, device: Device) -> None:
        self._scheduler = scheduler
        self._device = device
        self._limiter: anyio.CapacityLimiter | None = None

    async def make(self, step: Step) -> Late | None:
        """Masks and processors of those of ``step`` who have not ended. One who has no mask any more ends, with why.

        What would hold the loop for long is done in a thread, and the loop goes on meanwhile: anybody may end then, and
        is left out. Nobody else uses a masker meanwhile: tokens are accepted in commits, and this is awaited
        between two of them.
        """
        batch, active = step.batch, self._scheduler.rows.active
        late = np.flatnonzero(batch.late & active[batch.rows]).tolist()
        masked = [(index, masker) for index in late if (masker := step.sequences[index].masker) is not None]
        masks = self._device.masks(step.slot.index, len(masked))
        errors, at_once = await self._fill(masked, masks)
        for place, error in errors.items():
            sequence = step.sequences[masked[place][0]]
            if not sequence.finalized:
                self._scheduler.ends.finish(sequence, None, error=error)
        indices = [index for index, _ in masked]
        if errors or not at_once:  # else nobody can have ended
            alive = active[batch.rows]
            late = [index for index in late if alive[index]]
            places = [place for place, index in enumerate(indices) if alive[index] and place not in errors]
            if len(places) < len(indices):
                indices, masks = [indices[place] for place in places], masks[places]
        processors = []
        for index in late:
            sequence = step.sequences[index]
            if sequence.processor is not None:
                processors.append((index, sequence.processor, list(sequence.output)))
        if not indices and not processors:
            return None
        return Late(masked=np.array(indices, np.int32), masks=masks, processors=processors)

    async def _fill(
        self, masked: list[tuple[int, Masker]], masks: NDArray[np.uint32]
    ) -> tuple[dict[int, Exception], bool]:
        """What was raised, by place in ``masked``, and whether the loop did it all.

        Sorts ``masked`` where some take long, so that the loop does those that do not.
        """
        maskers = [masker for _, masker in masked]
        if any(masker.cost > QUICK for masker in maskers):
            masked.sort(key=lambda pair: pair[1].cost)
            maskers = [masker for _, masker in masked]
        done, errors = fill_quick(maskers, masks)
        if done == len(maskers):
            return errors, True
        # A limiter of its own: the app's threads may all be taken, and nobody gets a token before this is done.
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(1)
        others = await anyio.to_thread.run_sync(fill_all, maskers[done:], masks[done:], limiter=self._limiter)
        errors.update({done + place: error for place, error in others.items()})
        return errors, False
