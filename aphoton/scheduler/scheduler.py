"""`Scheduler`: who runs next, and what a commit changes."""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aphoton.device.base import PENDING, Batch, Limits, Results, Scored
from aphoton.kv import CachedPage
from aphoton.scheduler.ends import Ends
from aphoton.scheduler.holdings import Holdings
from aphoton.scheduler.leaders import SCORED_CHUNK, Heads, Leaders
from aphoton.scheduler.rows import Rows
from aphoton.scheduler.sequence import Sequence
from aphoton.scheduler.step import Step
from aphoton.scheduler.waiting import Waiting

__all__ = ["Scheduler"]

NEWCOMERS, SHARED_PAGES = 32, 4096
"""That begin in a step, and cached pages that they take up, about: one costs the host some 25 microseconds, the other
about one, and the loop stands still meanwhile."""


class Scheduler:
    """Chooses who runs next, and takes what has been computed. Every method returns at once; `Pipeline` calls
    `next_batch` and `commit` in the order of the tick.

    When pages run out, the youngest of the least urgent is preempted: it waits again, in its old place, and what it
    had is computed anew as if it were a prompt. Its row goes back as late as a zombie's, and what steps in flight have
    sampled for it is dropped: its random stream is counted by tokens, so the same is sampled again. The oldest of the
    most urgent is never preempted, and it fits alone, so somebody always comes to an end.

    :ivar waiting: sequences without a row, in the order in which they get one; and preempted ones whose row is not
        back yet.
    :ivar zombies_total: rows computed for a sequence that had ended by the commit.
    :ivar preemptions: rows taken away for want of pages.
    :ivar tokens: tokens committed to sequences.
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
        """
        :param max_step_tokens: tokens that a step with prompts feeds, but of prompts half of it in any case.
        :param check: assert every invariant at each launch and commit (slow).
        """
        self.limits = limits
        self.page_size = page_size
        self.max_step_tokens = max_step_tokens
        self.now = now
        self.rows = Rows(max_rows)
        self.holdings = Holdings(self.rows, limits.pages, page_size=page_size)
        self.pool, self.tables, self.cache = self.holdings.pool, self.holdings.tables, self.holdings.cache
        self.waiting = Waiting()
        self._leaders = Leaders(self.rows, self.holdings, max_step_tokens=max_step_tokens)
        self.ends = Ends(
            self.rows, self.holdings, self.waiting, self._leaders, eos_token_ids=limits.eos_token_ids, now=now
        )
        self.tokens = 0
        self.zombies_total = 0
        self.preemptions = 0
        self._arrivals = 0
        self._check = check
        self._checks = 0

    # What there is

    @property
    def running(self) -> int:
        """Sequences with a row that have not ended."""
        return int(np.count_nonzero(self.rows.active))

    @property
    def zombies(self) -> int:
        """Sequences that have ended and still hold their row."""
        return self.rows.count - self.rows.free - self.running - int(np.count_nonzero(self.rows.preempted))

    @property
    def idle(self) -> bool:
        """Nobody waits, nobody runs."""
        return not self.waiting and self.rows.free == self.rows.count

    @property
    def admissible(self) -> int:
        """Of those who wait, how many have rows and pages there for them now; and one more, if some are left."""
        rows, pages, count = self.rows.free, self._room(), 0
        for sequence in self.waiting:
            pages -= self.pages_for(len(sequence.prompt) + len(sequence.output), 1)
            if count == rows or pages < 0:
                return count
            count += 1
        return count + (rows > count and pages > 0)

    def pages_for(self, prompt: int, limit: int) -> int:
        """Pages that a sequence needs to run to its end."""
        return self.holdings.pages_for(prompt, limit)

    def _room(self) -> int:
        """Pages for newcomers: one is left alone for each of those who run and need more. Else they were preempted at
        once."""
        return self.holdings.room - self._wanting()

    def _wanting(self) -> int:
        """Those who run and need more pages than they have."""
        rows, size = self.rows, self.page_size
        held = -(-np.maximum(rows.context, rows.begun) // size)
        return int(np.count_nonzero(rows.active & (held < -(-rows.reach // size))))

    # Who comes, and who is set back

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence behind those of its priority that wait.

        It must fit (`pages_for` at most ``pool.usable``).
        """
        assert self.pages_for(len(sequence.prompt), sequence.limit) <= self.pool.usable
        self._arrivals += 1
        sequence.arrival = self._arrivals
        if sequence.namespace is not None:
            self.cache.enter(sequence.namespace)
        self.waiting.add(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        row = sequence.row
        self.rows.deactivate(row)
        self.rows.preempted[row] = True
        self.waiting.put_back(sequence)
        self.preemptions += 1
        if self.rows.refs[row] == 0:
            self.ends.release(sequence)

    # Launch

    def next_batch(self) -> tuple[Batch, list[Sequence]] | None:
        """Choose the rows of the next launch, and count it against them. None when no row has anything to do.

        Running sequences first, each with its last token wherever that is by now; then prompts, those that have been
        begun and those of newcomers in one order, while rows, pages and the step's tokens last. An end that can be
        foreseen (``limit``) takes no further launch, so it makes no zombie.
        """
        rows = self.rows
        decode = (rows.decoding & (rows.launched < rows.limit)).nonzero()[0].astype(np.int32)
        starts = rows.context[decode]
        full = decode[starts % self.page_size == 0]
        tight = len(full) > self.pool.free
        if tight:
            decode, full, tight = self._make_room(decode, full)
            starts = rows.context[decode]
        if len(full):
            self.holdings.extend(full)
        newcomers: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        if rows.prefilling or (self.waiting and rows.free and not tight):
            begun = deque(sorted(rows.prefilling, key=lambda one: one.order))
            # Whoever decodes counts, too, so that steps are of one length; but prompts have half of it in any case.
            budget = max(self.max_step_tokens - len(decode), -(-self.max_step_tokens // 2))
            if not tight:
                budget = self._admit(begun, newcomers, chunks, budget)
            self._go_on(begun, chunks, budget)
        if not len(decode) and not chunks:
            return None
        batch = self._batch(decode, starts, chunks, newcomers)
        rows.context[batch.rows] += batch.lengths
        rows.launched[batch.rows] += ~batch.partial if chunks else 1
        rows.refs[batch.rows] += 1
        for sequence, _ in chunks:
            self._chunk_launched(sequence)
        if self._check:
            self.check()
        sequences = [rows.sequences[row] for row in batch.rows.tolist()]
        return batch, cast("list[Sequence]", sequences)  # whoever runs has a row

    def _batch(
        self,
        decode: NDArray[np.int32],
        starts: NDArray[np.int32],
        chunks: list[tuple[Sequence, int]],
        newcomers: list[Sequence],
    ) -> Batch:
        rows = self.rows
        count = len(decode)
        chosen, lengths = decode, np.ones(count, np.int32)
        tokens, partial = np.full(count, PENDING, np.int32), np.zeros(count, np.bool_)
        scored: list[Scored] = []
        if chunks:
            more = np.array([s.row for s, _ in chunks], np.int32)
            fed = np.array([length for _, length in chunks], np.int32)
            begin = rows.context[more]
            known = [rows.known[row] for row in more.tolist()]
            ends = begin + fed
            chosen = np.concatenate((decode, more))
            lengths = np.concatenate((lengths, fed))
            starts = np.concatenate((starts, begin))
            parts = [all_[a:b] for all_, a, b in zip(known, begin.tolist(), ends.tolist(), strict=True)]
            tokens = np.concatenate((tokens, *parts))
            last = ends == np.array([len(one) for one in known], np.int32)
            partial = np.concatenate((partial, ~last | (rows.limit[more] == 0)))
            for index, (sequence, length) in enumerate(chunks, count):
                if sequence.prompt_logprobs is not None:
                    start = int(starts[index])
                    targets = sequence.prompt[start + 1 : start + length + 1]
                    if len(targets) and start >= rows.scored[sequence.row]:
                        scored.append(Scored(index=index, targets=targets, top=sequence.prompt_logprobs))
        return Batch(
            rows=chosen,
            starts=starts,
            lengths=lengths,
            counts=rows.launched[chosen],
            tokens=tokens,
            new_pages=self.tables.drain(),
            partial=partial,
            late=rows.late[chosen] & ~partial if rows.lates else np.zeros(len(chosen), np.bool_),
            admitted=[s.sampling for s in newcomers],
            scored=scored,
        )

    def _chunk_launched(self, sequence: Sequence) -> None:
        row = sequence.row
        if self.rows.context[row] == len(self.rows.known[row]):
            self.rows.decode(row)
        self.holdings.filled(sequence)

    # Prompts

    def _go_on(
        self, begun: deque[Sequence], chunks: list[tuple[Sequence, int]], budget: int, before: Sequence | None = None
    ) -> int:
        """Feed those whose prompts have been begun, up to whom ``before`` goes before; what is left of ``budget``."""
        while budget and begun and (before is None or begun[0].order < before.order):
            sequence = begun.popleft()
            length = self._length(sequence, budget)
            budget -= length
            chunks.append((sequence, length))
        return budget

    def _length(self, sequence: Sequence, budget: int) -> int:
        """Tokens that it feeds next."""
        row = sequence.row
        start, scored = int(self.rows.context[row]), self.rows.scored[row]
        length = min(len(self.rows.known[row]) - start, budget)
        if sequence.prompt_logprobs is not None and max(start, scored) < len(sequence.prompt) - 1:
            # What has been scored before a preemption is not scored again.
            length = min(length, scored - start if start < scored else SCORED_CHUNK)
        return length

    def _admit(
        self, begun: deque[Sequence], newcomers: list[Sequence], chunks: list[tuple[Sequence, int]], budget: int
    ) -> int:
        """Give rows and pages to those who wait, in their order: nobody overtakes one that does not fit. Those whose
        prompts have been ``begun`` go on in the midst of them. What is left of ``budget``.

        Who begins with pages that are just being computed waits for them, and keeps its claim: see `Leaders`.
        """
        claimed = shared = 0
        heads: Heads | None = None
        wanting = self._wanting()
        for sequence in list(islice(self.waiting, self.rows.free)):  # each takes a row, or keeps one
            budget = self._go_on(begun, chunks, budget, before=sequence)
            if not budget or len(newcomers) == NEWCOMERS or shared >= SHARED_PAGES:
                break
            if sequence.row:  # preempted, and a step in flight has its row
                break
            room = self.holdings.room - wanting - claimed
            if self.waiting.refused == (sequence.arrival, room):
                break
            if claim := self._leaders.claim(sequence):
                claimed += claim
                continue
            known = sequence.known
            path = self.holdings.match(sequence, known, self._leaders.take(sequence))
            if heads is None:
                heads = self._leaders.heads(self.rows.prefilling)
            if claim := self._leaders.follow(sequence, known, path, heads):
                claimed += claim
                continue
            if self.holdings.needed(sequence, known, path) > room:
                self.waiting.refused = (sequence.arrival, room)
                break
            self._seat(sequence, path)
            wanting += self.holdings.wants(sequence, known)
            self._leaders.put_head(heads, sequence)
            length = self._length(sequence, budget)
            budget -= length
            shared += len(path)
            chunks.append((sequence, length))
            newcomers.append(sequence)
            self.ends.tell_room()
        return budget

    def _seat(self, sequence: Sequence, path: list[CachedPage]) -> None:
        sampling = sequence.sampling
        sampling.row = self.rows.assign(sequence)
        if sampling.penalized:
            sampling.output = tuple(sequence.output)
        self.holdings.seat(sequence, path)
        if sequence.admitted_at is None:
            sequence.admitted_at = self.now()
            sequence.cached = int(self.rows.context[sequence.row])
        self.waiting.remove(sequence)

    # Pages

    def _make_room(
        self, decode: NDArray[np.int32], full: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], bool]:
        """Free a page for each row of ``full``: from the cache, and then by preemption.

        What a preempted row had is free only when no step in flight computes it: rows that go without a page until then
        miss this step.

        :returns: those of ``decode`` that run, those of ``full`` that get a page, and whether pages are short.
        """
        rows, preemptions = self.rows, self.preemptions
        while True:
            full = full[rows.active[full]]
            lack = len(full) - self.pool.free
            lack -= self.cache.evict(lack)
            if lack <= 0:
                break
            ends = rows.decoding & (rows.launched >= rows.limit)  # with the steps in flight
            taken = [row for row, sequence in enumerate(rows.sequences) if sequence is not None]
            staying = [row for row in taken if rows.active[row] and not ends[row]]
            if lack <= self.holdings.coming([row for row in taken if row not in staying], staying):
                break
            self._preempt(max((rows.holder(row) for row in staying), key=lambda one: one.order))
        decode = decode[rows.active[decode]]
        if lack > 0:
            order = sorted(full.tolist(), key=lambda row: rows.holder(row).order)
            without = order[self.pool.free :]
            full = np.array(order[: self.pool.free], np.int32)
            decode = decode[~np.isin(decode, without)]
        return decode, full, lack > 0 or self.preemptions > preemptions

    # Commit

    def commit(self, step: Step, results: Results) -> None:
        """Take a step's tokens: append them, end what ends, give back what nobody computes any more."""
        rows, batch = self.rows, step.batch
        chosen = batch.rows
        rows.refs[chosen] -= 1
        alive = self._alive(step)
        parts = bool(batch.partial.any())
        sampled = alive & ~batch.partial if parts else alive
        if results.faulty is not None or results.barred is not None or results.errors:
            sampled = self.ends.fail(step, results, sampled)
        rows.committed[chosen[sampled]] += 1
        awaited = self._append(step, results, sampled)
        if batch.scored:
            self._score(step, results, alive)
        self.ends.end_sampled(step, results, sampled)
        if parts:
            self.ends.end_computed(step, alive)
        for sequence in awaited:
            if sequence.on_tokens is not None:  # else it has ended, and that has been told
                sequence.on_tokens()
        if not alive.all():
            self.zombies_total += int(np.count_nonzero(~alive & ~rows.preempted[chosen]))
            for index in np.flatnonzero(~alive & (rows.refs[chosen] == 0)).tolist():
                if step.sequences[index].row:  # who consumes another one's tokens may have ended a preempted one by now
                    self.ends.release(step.sequences[index])
        if self._check:
            self.check()

    def _alive(self, step: Step) -> NDArray[np.bool_]:
        """[n] the sequences of the step that have not ended, nor been preempted: the tokens of others are dropped."""
        return self.rows.active[step.batch.rows]

    def _append(self, step: Step, results: Results, sampled: NDArray[np.bool_]) -> list[Sequence]:
        """Hand out the tokens; the sequences whose tokens somebody awaits.

        This loop runs for every token that the engine makes: keep it small.
        """
        awaited: list[Sequence] = []
        tokens = results.tokens.tolist()
        for index in (sampled & (step.batch.counts == 0)).nonzero()[0].tolist():
            step.sequences[index].first_token_at = self.now()
        logprobs = None if results.logprobs is None else results.logprobs.tolist()
        for index in sampled.nonzero()[0].tolist():
            sequence = step.sequences[index]
            sequence.output.append(tokens[index])
            if logprobs is not None and (top := sequence.sampling.logprobs) is not None:
                ids, values = results.top_ids if top else None, results.top_logprobs
                if ids is None or values is None:
                    sequence.logprobs.add([tokens[index]], [logprobs[index]], None, None)
                else:
                    one = slice(index, index + 1)
                    sequence.logprobs.add([tokens[index]], [logprobs[index]], ids[one, :top], values[one, :top])
            if sequence.on_tokens is not None:
                awaited.append(sequence)
        self.tokens += int(np.count_nonzero(sampled))
        return awaited

    def _score(self, step: Step, results: Results, alive: NDArray[np.bool_]) -> None:
        """Take the log-probabilities of the prompts' own tokens."""
        for scored, scores in zip(step.batch.scored, results.scores, strict=True):
            if alive[scored.index]:
                step.sequences[scored.index].prompt_scores.add(
                    scored.targets.tolist(),
                    scores.logprobs.tolist(),
                    scores.top_ids[:, : scored.top] if scored.top else None,
                    scores.top_logprobs[:, : scored.top] if scored.top else None,
                )

    # Invariants

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        rows = self.rows
        assert rows.refs.min() >= 0 and rows.refs.max() <= 2, "at most two steps in flight"
        assert (rows.committed <= rows.launched).all()
        assert (rows.launched - rows.committed)[rows.active].max(initial=0) <= 2
        waiting = set(self.waiting)
        assert len(waiting) == len(self.waiting)
        assert [one.order for one in self.waiting] == sorted(one.order for one in waiting), "in order"
        assert not any(one.finalized for one in waiting)
        self._leaders.check(waiting)
        for row, sequence in enumerate(rows.sequences):
            if sequence is None:
                assert not rows.active[row] and not rows.refs[row] and not rows.preempted[row], row
                continue
            assert sequence.row == row
            assert rows.preempted[row] == (sequence in waiting), row
            assert rows.active[row] == (not sequence.finalized and not rows.preempted[row]), row
            assert rows.active[row] or rows.refs[row] > 0, "a sequence that has ended is held by steps in flight only"
            begun = rows.active[row] and rows.context[row] < len(rows.known[row])
            assert (sequence in rows.prefilling) == begun == (rows.active[row] and not rows.decoding[row]), row
        assert rows.lates == np.count_nonzero(rows.late)
        self._checks += 1
        if self.pool.used < 1000 or not self._checks % 50:  # it looks at each page
            self.holdings.check()

    def check_idle(self) -> None:
        """Assert that nothing is held when nobody is there."""
        assert self.idle
        assert not self.rows.refs.any() and not self.rows.active.any(), "all rows are back"
        assert not self.rows.prefilling
        self._leaders.check_idle()
        self.holdings.check_idle()
