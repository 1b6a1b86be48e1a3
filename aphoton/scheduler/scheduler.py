"""`Scheduler`: who waits, who runs, which rows a launch takes, and what a commit ends."""

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aphoton.completion import FinishReason, TokenLogprob
from aphoton.device.base import PENDING, Batch, Limits, Results
from aphoton.errors import ModelError
from aphoton.kv import PagePool, PageTable
from aphoton.scheduler.rows import Rows
from aphoton.scheduler.sequence import Sequence
from aphoton.scheduler.step import Step

__all__ = ["Scheduler"]


class Scheduler:
    """The state of all sequences. Every method returns at once; `Pipeline` calls them in the order of the tick.

    Ends go one way, `finish`: the result is out at once (finalize early), the row and its pages go back when no step
    in flight computes them (free late). A sequence in between is a zombie; what steps compute for it is dropped.

    :ivar waiting: sequences without a row, in the order of arrival.
    :ivar zombies_total: rows computed for a sequence that had ended by the commit.
    :ivar tokens: tokens committed to sequences.
    :ivar on_room: called when a sequence has left ``waiting``, with a row or without, and when a row came back.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        max_rows: int,
        page_size: int,
        max_step_tokens: int,
        now: Callable[[], float],
        check: bool = False,
    ) -> None:
        """:param check: assert every invariant at each launch and commit (slow)."""
        self.limits = limits
        self.page_size = page_size
        self.max_step_tokens = max_step_tokens
        self.now = now
        self.rows = Rows(max_rows)
        self.pool = PagePool(limits.pages)
        self.tables = PageTable()
        self.waiting: dict[Sequence, None] = {}
        self.tokens = 0
        self.zombies_total = 0
        self.on_room: Callable[[], None] | None = None
        self._check = check

    # What there is

    @property
    def running(self) -> int:
        """Sequences with a row that have not ended."""
        return int(np.count_nonzero(self.rows.active))

    @property
    def zombies(self) -> int:
        """Sequences that have ended and still hold their row."""
        return self.rows.count - self.rows.free - self.running

    @property
    def idle(self) -> bool:
        """Nobody waits, nobody runs."""
        return not self.waiting and self.rows.free == self.rows.count

    @property
    def admissible(self) -> int:
        """Of those who wait, how many have rows and pages there for them now; and one more, if some are left."""
        rows, pages, count = self.rows.free, self.pool.free - self.pool.reserved, 0
        for sequence in self.waiting:
            pages -= self.pages_for(len(sequence.prompt), sequence.limit)
            if count == rows or pages < 0:
                return count
            count += 1
        return count + (rows > count and pages > 0)

    def pages_for(self, prompt: int, limit: int) -> int:
        """Pages that a sequence needs to run to its end. Its last token is never fed, so it needs no place."""
        return -(-(prompt + limit - 1) // self.page_size)

    # Arrivals and ends

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence behind those that wait. It must fit (`pages_for` at most ``pool.usable``)."""
        assert self.pages_for(len(sequence.prompt), sequence.limit) <= self.pool.usable
        self.waiting[sequence] = None

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
        sequence.error = error
        sequence.finished_at = self.now()
        if sequence.row:
            self.rows.active[sequence.row] = False
            if self.rows.refs[sequence.row] == 0:
                self._release(sequence)
        else:
            del self.waiting[sequence]
            self._tell_room()
        if sequence.on_end is not None:
            sequence.on_end()
        # They hold whoever consumes the sequence, who holds it: a circle that only the garbage collector would break.
        sequence.on_end = sequence.on_tokens = sequence.watch = None

    def abort(self, sequence: Sequence) -> None:
        """End ``sequence`` because nobody wants it any more. Nothing happens when it has ended already."""
        if not sequence.finalized:
            self.finish(sequence, "abort")

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """End everyone, each with an ``error`` of its own: no step will follow."""
        for sequence in [*self.waiting, *(s for s in self.rows.sequences if s is not None)]:
            if not sequence.finalized:
                self.finish(sequence, None, error=error())

    def _tell_room(self) -> None:
        if self.on_room is not None:
            self.on_room()

    def _release(self, sequence: Sequence) -> None:
        row = sequence.row
        self.pool.release(self.tables.clear(row))
        self.pool.unreserve(int(self.rows.reserved[row]))
        self.rows.release(row)
        self._tell_room()

    # Launch

    def next_batch(self) -> tuple[Batch, list[Sequence]] | None:
        """Choose the rows of the next launch, and count it against them. None when no row has anything to do.

        Running sequences first, each with its last token wherever that is by now; then newcomers with their prompts, in
        the order of arrival, while rows, pages and the step's tokens last. An end that can be foreseen (``limit``)
        takes no further launch, so it makes no zombie.
        """
        rows = self.rows
        decode = np.flatnonzero(rows.active & (rows.launched < rows.limit)).astype(np.int32)
        newcomers = self._admit()
        if not len(decode) and not newcomers:
            return None
        starts = rows.context[decode]
        self._take_pages(decode[starts % self.page_size == 0])
        chosen, lengths = decode, np.ones(len(decode), np.int32)
        tokens = np.full(len(decode), PENDING, np.int32)
        if newcomers:
            chosen = np.concatenate((decode, np.array([s.row for s in newcomers], np.int32)))
            lengths = np.concatenate((lengths, np.array([len(s.prompt) for s in newcomers], np.int32)))
            starts = np.concatenate((starts, np.zeros(len(newcomers), np.int32)))
            tokens = np.concatenate((tokens, *(s.prompt for s in newcomers)))
        batch = Batch(
            rows=chosen,
            starts=starts,
            lengths=lengths,
            counts=rows.launched[chosen],
            tokens=tokens,
            new_pages=self.tables.drain(),
            partial=np.zeros(len(chosen), np.bool_),
            late=np.zeros(len(chosen), np.bool_),
            admitted=[s.sampling for s in newcomers],
        )
        rows.context[chosen] += lengths
        rows.launched[chosen] += 1
        rows.refs[chosen] += 1
        if self._check:
            self.check()
        sequences = [rows.sequences[row] for row in chosen.tolist()]
        return batch, cast("list[Sequence]", sequences)  # whoever runs has a row

    def _admit(self) -> list[Sequence]:
        """Give rows and pages to those who wait, in the order of arrival: nobody overtakes one that does not fit."""
        newcomers: list[Sequence] = []
        budget = self.max_step_tokens
        while self.waiting and self.rows.free:
            sequence = next(iter(self.waiting))
            length = len(sequence.prompt)
            needed = self.pages_for(length, sequence.limit)
            if (newcomers and length > budget) or not self.pool.reserve(needed):
                break
            budget -= length
            row = self.rows.assign(sequence)
            sequence.sampling.row = row
            sequence.admitted_at = self.now()
            pages = -(-length // self.page_size)
            self.tables.extend(row, self.pool.take(pages))
            self.rows.reserved[row] = needed - pages
            del self.waiting[sequence]
            newcomers.append(sequence)
            self._tell_room()
        return newcomers

    def _take_pages(self, rows: NDArray[np.int32]) -> None:
        """The next page of each row."""
        for row, page in zip(rows.tolist(), self.pool.take(len(rows)), strict=True):
            self.tables.append(row, page)
        self.rows.reserved[rows] -= 1

    # Commit

    def commit(self, step: Step, results: Results) -> None:
        """Take a step's tokens: append them, end what ends, give back what nobody computes any more."""
        rows, chosen = self.rows, step.batch.rows
        rows.refs[chosen] -= 1
        alive = self._alive(step)
        rows.committed[chosen[alive]] += 1
        self._append(step, results, alive)
        self._end(step, results, alive)
        for index in np.flatnonzero(~alive & (rows.refs[chosen] == 0)).tolist():
            self._release(step.sequences[index])
        self.zombies_total += int(np.count_nonzero(~alive))
        if self._check:
            self.check()

    def _alive(self, step: Step) -> NDArray[np.bool_]:
        """[n] the sequences of the step that have not ended: the others are zombies, and their tokens are dropped."""
        return self.rows.active[step.batch.rows]

    def _append(self, step: Step, results: Results, alive: NDArray[np.bool_]) -> None:
        """Hand out the tokens. This loop runs for every token that the engine makes: keep it small."""
        tokens = results.tokens.tolist()
        for index in np.flatnonzero(alive & (step.batch.counts == 0)).tolist():
            step.sequences[index].first_token_at = self.now()
        wants = results.logprobs is not None
        for index in np.flatnonzero(alive).tolist():
            sequence = step.sequences[index]
            sequence.output.append(tokens[index])
            if wants and sequence.sampling.logprobs is not None:
                sequence.logprobs.append(_logprob(results, index, sequence.sampling.logprobs))
            if sequence.on_tokens is not None:
                sequence.on_tokens()
        self.tokens += int(np.count_nonzero(alive))

    def _end(self, step: Step, results: Results, alive: NDArray[np.bool_]) -> None:
        """Find the ends, for the whole step at once but for the rows that have stop strings."""
        rows, chosen = self.rows, step.batch.rows
        enough = alive & (rows.committed[chosen] > rows.min_tokens[chosen])
        stopped = enough & (rows.stop_ids[chosen] == results.tokens[:, None]).any(axis=1)
        length = alive & (rows.committed[chosen] >= rows.limit[chosen])
        faulty = alive & results.faulty if results.faulty is not None else np.zeros_like(alive)
        for index in np.flatnonzero(faulty).tolist():
            sequence = step.sequences[index]
            sequence.output.pop()
            self.finish(sequence, None, error=ModelError("the model's logits are not finite: NaN or infinite"))
        for index in np.flatnonzero(stopped & ~faulty).tolist():
            self.finish(step.sequences[index], "stop", stop_reason=int(results.tokens[index]))
        for index in np.flatnonzero(alive & ~stopped & ~faulty & rows.watched[chosen]).tolist():
            sequence = step.sequences[index]
            assert sequence.watch is not None
            found = sequence.watch(int(results.tokens[index]))
            if found is not None:
                length[index] = False
                self.finish(sequence, "stop", stop_reason=found)
        for index in np.flatnonzero(length & ~stopped & ~faulty).tolist():
            self.finish(step.sequences[index], "length")

    # Invariants

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        rows = self.rows
        assert rows.refs.min() >= 0 and rows.refs.max() <= 2, "at most two steps in flight"
        assert (rows.committed <= rows.launched).all()
        assert (rows.launched - rows.committed)[rows.active].max(initial=0) <= 2
        held: list[int] = []
        for row, sequence in enumerate(rows.sequences):
            assert (sequence is None) == (not self.tables.count(row)), row
            if sequence is None:
                assert not rows.active[row] and not rows.refs[row], row
                continue
            assert sequence.row == row
            assert rows.active[row] != sequence.finalized, row
            assert rows.active[row] or rows.refs[row] > 0, "a sequence that has ended is held by steps in flight only"
            assert self.tables.count(row) * self.page_size >= rows.context[row]
            held += self.tables.pages(row)
        assert len(held) == len(set(held)), "a page belongs to one sequence"
        assert self.pool.used == len(held)
        assert self.pool.reserved == sum(int(rows.reserved[r]) for r, s in enumerate(rows.sequences) if s is not None)

    def check_idle(self) -> None:
        """Assert that nothing is held when nobody is there."""
        assert self.idle
        assert self.pool.free == self.pool.usable and self.pool.reserved == 0, "all pages are back"
        assert not self.rows.refs.any() and not self.rows.active.any(), "all rows are back"


def _logprob(results: Results, index: int, top: int) -> TokenLogprob:
    assert results.logprobs is not None
    pairs: tuple[tuple[int, float], ...] = ()
    if top and results.top_ids is not None and results.top_logprobs is not None:
        ids, values = results.top_ids[index, :top].tolist(), results.top_logprobs[index, :top].tolist()
        pairs = tuple(zip(ids, values, strict=True))
    return TokenLogprob(token_id=int(results.tokens[index]), logprob=float(results.logprobs[index]), top=pairs)
