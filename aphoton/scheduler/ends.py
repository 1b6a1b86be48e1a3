"""`Ends`: how sequences end, and which of them a commit ends."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aphoton.completion import FinishReason
from aphoton.device.base import Results
from aphoton.errors import ConstraintFailed, ModelError
from aphoton.scheduler.holdings import Holdings
from aphoton.scheduler.leaders import Leaders
from aphoton.scheduler.rows import Rows
from aphoton.scheduler.sequence import Sequence
from aphoton.scheduler.step import Step
from aphoton.scheduler.waiting import Waiting

__all__ = ["Ends"]


class Ends:
    """Ends go one way, `finish`: the result is out at once (finalize early), the row and its pages go back when no step
    in flight computes them (free late). A sequence in between is a zombie; what steps compute for it is dropped.

    :ivar on_room: called when a sequence has left ``waiting``, with a row or without, and when a row came back.
    """

    def __init__(
        self,
        rows: Rows,
        holdings: Holdings,
        waiting: Waiting,
        leaders: Leaders,
        *,
        eos_token_ids: tuple[int, ...],
        now: Callable[[], float],
    ) -> None:
        self.on_room: Callable[[], None] | None = None
        self._rows = rows
        self._holdings = holdings
        self._waiting = waiting
        self._leaders = leaders
        self._eos_token_ids = eos_token_ids
        self._now = now

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason | None,
        *,
        stop_reason: str | int | None = None,
        error: Exception | None = None,
    ) -> None:
        """End ``sequence``: its result goes out now, what it holds goes back when no step in flight computes it."""
        assert not sequence.finalized, "a sequence ends once"
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.complete = reason == "stop" and (stop_reason is None or stop_reason in self._eos_token_ids)
        sequence.error = error
        sequence.finished_at = self._now()
        row = sequence.row
        waits = not row or bool(self._rows.preempted[row])
        if waits:
            self._waiting.remove(sequence)
            self._leaders.leave(sequence)
        if row:
            self._rows.deactivate(row)
            self._rows.preempted[row] = False
            if self._rows.refs[row] == 0:
                self.release(sequence)
        elif sequence.namespace is not None:
            self._holdings.cache.leave(sequence.namespace)
        if waits:
            self.tell_room()
        if sequence.on_end is not None:
            sequence.on_end()
        # They hold whoever consumes the sequence, who holds it: a circle that only the garbage collector would break.
        sequence.on_end = sequence.on_tokens = sequence.watch = None
        sequence.masker = sequence.processor = None

    def abort(self, sequence: Sequence) -> None:
        """End ``sequence`` because nobody wants it any more. Nothing happens when it has ended already."""
        if not sequence.finalized:
            self.finish(sequence, "abort")

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """End everyone, each with an ``error`` of its own: no step will follow."""
        for sequence in [*self._waiting, *(s for s in self._rows.sequences if s is not None)]:
            if not sequence.finalized:
                self.finish(sequence, None, error=error())

    def release(self, sequence: Sequence) -> None:
        """Take back the row of a sequence that has ended or is preempted, and all that it holds."""
        ended, private, cache = sequence.finalized, sequence.namespace is not None, self._holdings.cache
        keep = sequence.cacheable and not (ended and private and cache.alone(sequence.namespace))
        self._holdings.release(sequence, keep=keep, sound=not isinstance(sequence.error, ModelError))
        self._rows.release(sequence.row)
        if ended and private:
            cache.leave(sequence.namespace)
        self.tell_room()

    def tell_room(self) -> None:
        """A place in the queue or a row has come free."""
        if self.on_room is not None:
            self.on_room()

    # In a commit

    def fail(self, step: Step, results: Results, sampled: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """End those whose token means nothing; [n] the others of ``sampled``."""
        errors = {index: error for index, error in results.errors.items() if sampled[index]}
        if results.faulty is not None:
            for index in np.flatnonzero(sampled & results.faulty).tolist():
                errors[index] = ModelError("the model's logits are not finite: NaN or infinite")
        if results.barred is not None:
            for index in np.flatnonzero(sampled & results.barred).tolist():
                errors.setdefault(index, _nothing_left(step.sequences[index]))
        if errors:
            sampled = sampled.copy()
            for index, error in errors.items():
                sampled[index] = False
                self.finish(step.sequences[index], None, error=error)
        return sampled

    def end_sampled(self, step: Step, results: Results, sampled: NDArray[np.bool_]) -> None:
        """End those whose token, which has been committed, is their last.

        For the whole step at once but for the rows that have stop strings or rules.

        :param sampled: [n] those who have got a token.
        """
        rows, chosen = self._rows, step.batch.rows
        committed = rows.committed[chosen]
        enough = sampled & (committed > rows.min_tokens[chosen])
        stopped = enough & (rows.stop_ids[chosen] == results.tokens[:, None]).any(axis=1)
        length = sampled & (committed >= rows.limit[chosen])
        over: list[Sequence] = []
        if rows.lates and (late := step.batch.late & sampled).any():
            over = self._accept(step, results, late)
        for index in stopped.nonzero()[0].tolist():
            if not step.sequences[index].finalized:
                self.finish(step.sequences[index], "stop", stop_reason=int(results.tokens[index]))
        for index in (sampled & ~stopped & rows.watched[chosen]).nonzero()[0].tolist():
            sequence = step.sequences[index]
            if sequence.watch is not None:  # a rule may have ended it with an error
                found = sequence.watch(int(results.tokens[index]))
                if found is not None:
                    self.finish(sequence, "stop", stop_reason=found)
        for sequence in over:
            if not sequence.finalized:
                self.finish(sequence, "stop")
        for index in (length & ~stopped).nonzero()[0].tolist():
            if not step.sequences[index].finalized:
                self.finish(step.sequences[index], "length")

    def end_computed(self, step: Step, alive: NDArray[np.bool_]) -> None:
        """End those prompts that were to be computed only, and have been."""
        batch, rows = step.batch, self._rows
        for index in np.flatnonzero(alive & batch.partial & (rows.limit[batch.rows] == 0)).tolist():
            if batch.starts[index] + batch.lengths[index] == len(rows.known[batch.rows[index]]):
                self.finish(step.sequences[index], "length")

    def _accept(self, step: Step, results: Results, late: NDArray[np.bool_]) -> list[Sequence]:
        """Tell the maskers of their tokens; the sequences that may have no further one."""
        over: list[Sequence] = []
        tokens = results.tokens.tolist()
        for index in late.nonzero()[0].tolist():
            sequence = step.sequences[index]
            if sequence.masker is not None:
                try:
                    if sequence.masker.accept(tokens[index]):
                        over.append(sequence)
                except Exception as error:
                    self.finish(sequence, None, error=error)
        return over


def _nothing_left(sequence: Sequence) -> ConstraintFailed:
    """Names one of what it asks for: whose doing it is, most likely."""
    sampling = sequence.sampling
    if sequence.processor is not None:
        field = "processor"
    elif len(sequence.output) < sampling.min_tokens:
        field = "min_tokens"
    elif sampling.penalized:
        field = "repetition_penalty"
    else:
        field = "allowed_token_ids" if sampling.allowed is not None else "logit_bias"
    return ConstraintFailed(field, "no token is left that this, and what else the request asks for, allow")
