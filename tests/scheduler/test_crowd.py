"""Crowds of sequences that ask for everything: what one gets depends neither on others nor on how they are run."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler.crowd import Told, random_crowd, run_crowd

from aphoton.device.base import Late
from aphoton.kv import CachedPage, RadixCache
from aphoton.scheduler import Scheduler, Sequence
from aphoton.scheduler.holdings import Holdings
from aphoton.scheduler.latework import LateWork
from aphoton.scheduler.rows import Rows
from aphoton.scheduler.step import Step


@pytest.mark.timeout(600)
def test_every_invariant_holds_on_a_thousand_crowds() -> None:
    told: list[Told] = []

    async def all_of_them() -> None:
        for seed in range(1000):
            try:
                told.append(await run_crowd(random_crowd(seed)))
            except BaseException as error:
                error.add_note(f"random_crowd({seed})")
                raise

    asyncio.run(all_of_them())
    sequences = [sequence for one in told for sequence in one.sequences]
    assert sum(one.preemptions for one in told) > 200, "pages have run out"
    assert sum(sequence.cached > 0 for sequence in sequences) > 500, "pages have been shared"
    assert {sequence.finish_reason for sequence in sequences} == {"stop", "length", "abort", None}


@pytest.mark.timeout(600)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_maskers_in_a_thread_are_told_the_same(seed: int) -> None:
    asyncio.run(run_crowd(random_crowd(seed, slow=True)))


@pytest.mark.timeout(600)
def test_tokens_do_not_depend_on_depth_cache_budget_pages_or_rows() -> None:
    preemptions: dict[int, int] = {}
    fed: dict[tuple[int, bool], int] = {}
    for seed in range(25):
        crowd = random_crowd(seed)
        crowd = replace(crowd, wants=tuple(replace(want, leave=None) for want in crowd.wants))
        least = max(-(-(len(one.prompt) + max(one.limit, 1) - 1) // crowd.page_size) for one in crowd.wants)
        results = []
        for depth, cache, budget, more, rows in (
            (1, True, 64, 200, 6),
            (2, True, 64, 200, 6),
            (2, False, 64, 200, 6),
            (2, True, 1, 200, 6),
            (1, False, 3, 0, 6),
            (2, True, 5, 0, 6),
            (2, True, 64, 2, 6),
            (2, True, 64, 0, 1),
        ):
            told = asyncio.run(
                run_crowd(
                    replace(
                        crowd,
                        depth=depth,  # type: ignore[arg-type]
                        prefix_cache=cache,
                        max_step_tokens=budget,
                        pages=least + more,
                        max_rows=rows,
                    )
                )
            )
            preemptions[more] = preemptions.get(more, 0) + told.preemptions
            fed[more, cache] = fed.get((more, cache), 0) + told.tokens_fed
            results.append([(one.output, one.finish_reason, one.prompt_scores.read()) for one in told.sequences])
        assert all(result == results[0] for result in results[1:])
    assert preemptions[200] == 0 < preemptions[2] < preemptions[0]
    assert fed[200, True] / 3 < fed[200, False], "what is shared is not computed again"


# Broken on purpose: each of these must be caught.


def preempted_row_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def broken(self: Scheduler, sequence: Sequence) -> None:
        row = sequence.row
        preempt(self, sequence)
        if sequence.row:
            self.rows.refs[row] = 0
            self.ends.release(sequence)

    patch.setattr(Scheduler, "_preempt", broken)


def preempted_sequences_keep_what_is_in_flight_for_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Scheduler, "_alive", lambda self, step: self.rows.active[step.batch.rows] | self.rows.preempted[step.batch.rows]
    )


def shared_pages_without_a_reference(patch: pytest.MonkeyPatch) -> None:
    use = RadixCache.use

    def broken(self: RadixCache, path: list[CachedPage]) -> None:
        use(self, path)
        self.pool.release([page.page for page in path])

    patch.setattr(RadixCache, "use", broken)


def pages_shared_before_they_are_launched(patch: pytest.MonkeyPatch) -> None:
    seat = Holdings.seat

    def broken(self: Holdings, sequence: Sequence, path: list[CachedPage]) -> None:
        seat(self, sequence, path)
        context = self.rows.context[sequence.row]
        self.rows.context[sequence.row] = len(self.rows.known[sequence.row])
        self.filled(sequence)
        self.rows.context[sequence.row] = context

    patch.setattr(Holdings, "seat", broken)


def tokens_compared_in_part(patch: pytest.MonkeyPatch) -> None:
    """As a hash would that is the same for two pages."""
    match = RadixCache.match

    def broken(self: RadixCache, namespace: Any, tokens: Any, most: int) -> list[CachedPage]:
        path = match(self, namespace, tokens, most)
        parent = path[-1] if path else self._roots.get(namespace)
        if parent is not None and len(path) < most:
            size = self.page_size
            first = tokens[len(path) * size : len(path) * size + 1].tobytes()
            path += [page for key, page in parent.children.items() if key[:4] == first][:1]
        return path

    patch.setattr(RadixCache, "match", broken)


def the_whole_prompt_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holdings, "most", lambda self, sequence, known: len(known) // self.page_size)


def the_last_token_kept_though_nobody_fed_it(patch: pytest.MonkeyPatch) -> None:
    release = Holdings.release

    def broken(self: Holdings, sequence: Sequence, **how: Any) -> None:
        self.rows.context[sequence.row] += 1
        sequence.output.append(0)
        release(self, sequence, **how)
        sequence.output.pop()

    patch.setattr(Holdings, "release", broken)


def masks_for_the_wrong_rows(patch: pytest.MonkeyPatch) -> None:
    make = LateWork.make

    async def broken(self: LateWork, step: Step) -> Late | None:
        late = await make(self, step)
        if late is not None:
            late.masks = np.roll(late.masks, 1, axis=0)
        return late

    patch.setattr(LateWork, "make", broken)


def masks_for_parts_of_prompts(patch: pytest.MonkeyPatch) -> None:
    next_batch = Scheduler.next_batch

    def broken(self: Scheduler) -> Any:
        chosen = next_batch(self)
        if chosen is not None:
            chosen[0].late[:] = self.rows.late[chosen[0].rows]
        return chosen

    patch.setattr(Scheduler, "next_batch", broken)


def prompts_scored_again_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    assign = Rows.assign

    def broken(self: Rows, sequence: Sequence) -> int:
        row = assign(self, sequence)
        self.scored[row] = 0
        return row

    patch.setattr(Rows, "assign", broken)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "defect",
    [
        preempted_row_freed_at_once,
        preempted_sequences_keep_what_is_in_flight_for_them,
        shared_pages_without_a_reference,
        pages_shared_before_they_are_launched,
        tokens_compared_in_part,
        the_whole_prompt_from_the_cache,
        the_last_token_kept_though_nobody_fed_it,
        masks_for_the_wrong_rows,
        masks_for_parts_of_prompts,
        prompts_scored_again_after_a_preemption,
    ],
)
@pytest.mark.parametrize("checked", [True, False], ids=["checks", "device only"])
def test_a_broken_scheduler_is_caught(
    defect: Callable[[pytest.MonkeyPatch], None], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scheduler's own invariants asserted at each step, and by the device and the tokens alone."""
    with monkeypatch.context() as patch:
        defect(patch)
        if not checked:
            patch.setattr(Scheduler, "check", lambda self: None)
        for seed in range(1000):
            try:
                asyncio.run(run_crowd(random_crowd(seed)))
            except (AssertionError, IndexError, KeyError, ExceptionGroup):
                return
    pytest.fail("1000 crowds did not notice")
