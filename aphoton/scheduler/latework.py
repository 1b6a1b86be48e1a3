"""`LateWork`: what sampling waits for, made on the host when the step before has been committed."""

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aphoton.device.base import Late
from aphoton.sampling import Masker
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

        Maskers that are not known to be quick work in a thread, and the loop goes on meanwhile: anybody may end then,
        and is left out. Nobody else uses a masker meanwhile: tokens are accepted in commits, and this is awaited
        between two of them.
        """
        batch, active = step.batch, self._scheduler.rows.active
        masked: list[tuple[int, Masker]] = []
        for index in np.flatnonzero(batch.late & active[batch.rows]).tolist():
            masker = step.sequences[index].masker
            if masker is not None:
                masked.append((index, masker))
        masks = np.empty((len(masked), self._words), np.uint32)
        errors: dict[int, Exception] = {}
        slow: list[tuple[int, Masker]] = []
        for place, (_, masker) in enumerate(masked):
            if masker.quick:
                _fill(masks, [(place, masker)], errors)
            else:
                slow.append((place, masker))
        if slow:
            # A limiter of its own: the app's threads may all be taken, and nobody gets a token before this is done.
            if self._limiter is None:
                self._limiter = anyio.CapacityLimiter(1)
            await anyio.to_thread.run_sync(_fill, masks, slow, errors, limiter=self._limiter)
        for place, error in errors.items():
            sequence = step.sequences[masked[place][0]]
            if not sequence.finalized:
                self._scheduler.finish(sequence, None, error=error)
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


def _fill(masks: NDArray[np.uint32], maskers: list[tuple[int, Masker]], errors: dict[int, Exception]) -> None:
    """:param maskers: each with its place in ``masks``.
    :param errors: what went wrong, by that place.
    """
    for place, masker in maskers:
        try:
            masker.fill(masks[place])
        except Exception as error:
            errors[place] = error
