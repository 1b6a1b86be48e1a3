"""`LateWork`: what sampling waits for, made on the host when the step before has been committed."""

import anyio
import anyio.to_thread
import numpy as np

from aphoton.device.base import Late
from aphoton.sampling import Masker, fill_all, loop_share
from aphoton.scheduler.scheduler import Scheduler
from aphoton.scheduler.step import Step

__all__ = ["LateWork"]


class LateWork:
    """Makes the `Late` of a step, from the state as of the step before."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._words = -(-scheduler.limits.vocab_size // 32)
        self._limiter: anyio.CapacityLimiter | None = None

    async def make(self, step: Step) -> Late | None:
        """Masks and processors of those of ``step`` who have not ended. One who has no mask any more ends, with why.

        What would hold the loop for long is done in a thread, and the loop goes on meanwhile: anybody may end then, and
        is left out. Nobody else uses a masker meanwhile: tokens are accepted in commits, and this is awaited
        between two of them.
        """
        batch, active = step.batch, self._scheduler.rows.active
        masked: list[tuple[int, Masker]] = []
        for index in np.flatnonzero(batch.late & active[batch.rows]).tolist():
            masker = step.sequences[index].masker
            if masker is not None:
                masked.append((index, masker))
        masked.sort(key=lambda pair: pair[1].cost)
        quick = loop_share([masker.cost for _, masker in masked])
        masks = np.empty((len(masked), self._words), np.uint32)
        maskers = [masker for _, masker in masked]
        errors = fill_all(maskers[:quick], masks[:quick])
        if quick < len(masked):
            # A limiter of its own: the app's threads may all be taken, and nobody gets a token before this is done.
            if self._limiter is None:
                self._limiter = anyio.CapacityLimiter(1)
            late = await anyio.to_thread.run_sync(fill_all, maskers[quick:], masks[quick:], limiter=self._limiter)
            errors.update({quick + place: error for place, error in late.items()})
        for place, error in errors.items():
            sequence = step.sequences[masked[place][0]]
            if not sequence.finalized:
                self._scheduler.ends.finish(sequence, None, error=error)
        alive = active[batch.rows]
        places = [place for place, (index, _) in enumerate(masked) if alive[index] and place not in errors]
        processors = []
        for index in np.flatnonzero(batch.late & alive).tolist():
            sequence = step.sequences[index]
            if sequence.processor is not None:
                processors.append((index, sequence.processor, list(sequence.output)))
        if not places and not processors:
            return None
        return Late(
            masked=np.array([masked[place][0] for place in places], np.int32),
            masks=masks if len(places) == len(masked) else masks[places],
            processors=processors,
        )
