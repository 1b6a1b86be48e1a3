"""`Scheduler`, step by step: prompts in parts, whose turn it is, whose pages are taken, and what is shared."""

from typing import Any

import numpy as np
import pytest
from scheduler.ticking import PAGE, TOKEN, Ticking

from aphoton import EngineConfig, ModelError, TokenLogprob
from aphoton.scheduler import Sequence

# Prompts in parts


def test_a_long_prompt_is_fed_in_parts_beside_those_that_decode() -> None:
    of = Ticking(step=16)
    short = of.add([1, 2], limit=50)
    of.tick()
    long = of.add(range(100), limit=2)
    fed = [of.tick() for _ in range(7)]
    assert [step[long] for step in fed] == [15] * 6 + [10], "whoever decodes counts"
    assert all(step[short] == 1 for step in fed), "whoever decodes never waits"
    batches = [batch for batch, _ in of.launched[1:8]]
    assert [batch.partial.tolist() for batch in batches] == [[False, True]] * 6 + [[False, False]]
    assert np.concatenate([batch.tokens[1:] for batch in batches]).tolist() == list(range(100))
    assert [batch.starts[1] for batch in batches] == [0, 15, 30, 45, 60, 75, 90]
    assert [bool(batch.admitted) for batch in batches] == [True] + [False] * 6, "a row from the first part on"
    assert (len(short.output), len(long.output)) == (8, 1)


@pytest.mark.parametrize(("step", "half"), [(7, 4), (20, 10), (30, 20)])
def test_prompts_have_half_of_a_step_however_many_decode(step: int, half: int) -> None:
    of = Ticking(step=step, rows=12)
    for _ in range(10):
        of.add([1, 2], limit=90)
    while len(of.tick()) < 10:
        pass
    assert sum(of.tick().values()) == 10, "all decode"
    long = of.add(range(100), limit=2)
    fed = of.tick()
    assert fed[long] == half
    # Devices have buffers for no more.
    longest = EngineConfig(max_step_tokens=step, max_rows=12).longest_step
    assert step <= longest and sum(fed.values()) <= longest


def test_what_was_begun_goes_on_first_and_the_rest_of_the_step_is_for_newcomers() -> None:
    of = Ticking(step=10)
    first, second, third = of.add(range(14)), of.add(range(50, 58)), of.add(range(90, 93))
    assert of.tick() == {first: 10}
    assert of.tick() == {first: 4, second: 6}
    assert of.tick() == {first: 1, second: 2, third: 3}


def test_scored_prompts_are_fed_in_smaller_parts_and_all_of_each_but_the_first_token_is_scored() -> None:
    of = Ticking(pages=1000, step=4000)
    asks = of.add(range(1, 701), limit=1, prompt_logprobs=2)
    other = of.add(range(200, 900), limit=1)
    assert of.tick() == {asks: 512, other: 700}
    assert of.tick() == {asks: 188}
    assert [(s.index, s.top, len(s.targets)) for batch, _ in of.launched for s in batch.scored] == [
        (0, 2, 512),
        (0, 2, 187),
    ]
    assert [score.token_id for score in asks.prompt_scores.read()] == list(range(2, 701))
    assert [score.logprob for score in asks.prompt_scores.read()] == [-float(token) for token in range(2, 701)]
    assert asks.prompt_scores.read()[-1].top == ((0, 0.0), (1, 0.0))
    assert not other.prompt_scores


def test_entries_are_made_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(**fields: Any) -> TokenLogprob:
        nonlocal made
        made += 1
        return TokenLogprob(**fields)

    monkeypatch.setattr("aphoton.scheduler.logprobs.TokenLogprob", counted)
    of = Ticking()
    asks, plain = of.add(range(30), limit=4, prompt_logprobs=2), of.add([1], limit=4)
    asks.sampling.logprobs, plain.sampling.logprobs = 2, 0
    while not of.scheduler.idle:
        size = len(of.launch())
        found = np.arange(3 * size, dtype=np.int32).reshape(size, 3)
        top_ids, top_logprobs, logprobs = found, -found.astype(np.float32), -np.ones(size, np.float32)
        of.commit(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)
        found[:] = top_logprobs[:] = logprobs[:] = 99  # the next step's
    assert not made and (len(asks.prompt_scores), len(asks.logprobs), len(plain.logprobs)) == (29, 4, 4)
    entries = asks.logprobs.read()
    assert [(one.token_id, one.logprob) for one in entries] == [(TOKEN, -1.0)] * 4
    assert entries[0].top == ((0, 0.0), (1, -1.0))
    assert [one.top for one in plain.logprobs.read()] == [()] * 4
    asks.prompt_scores.read()
    assert asks.logprobs.read() is entries and made == 29 + 8


def test_a_prompt_alone() -> None:
    of = Ticking(step=8)
    only = of.add(range(10), limit=0, prompt_logprobs=0)
    beside = of.add([3], limit=4)
    assert of.tick() == {only: 8}
    assert not only.finalized
    assert of.tick() == {only: 2, beside: 1}
    assert (only.finish_reason, only.output, only.first_token_at) == ("length", [], None)
    assert [score.token_id for score in only.prompt_scores.read()] == list(range(1, 10))
    of.to_the_end()
    assert beside.output == [TOKEN] * 4


def test_a_prompt_alone_ends_with_its_last_part_and_not_before() -> None:
    of = Ticking(step=8)
    only = of.add(range(10), limit=0, prompt_logprobs=0)
    of.launch()
    of.launch()
    of.commit()
    assert not only.finalized
    of.commit()
    assert only.finalized and len(only.prompt_scores) == 9
    of.scheduler.check_idle()


# Whose turn it is


def test_lower_priorities_first_and_who_came_first_inside() -> None:
    of = Ticking(rows=1, prefix_cache=False)
    running = of.add([1], limit=2)
    of.tick()
    asks = [of.add([index], limit=1, priority=priority) for index, priority in enumerate((5, 0, -3, 0, -3))]
    order = [one for step in of.to_the_end() for one in step]
    assert order == [running, asks[2], asks[4], asks[1], asks[3], asks[0]], "who runs is not set back for the urgent"


def test_the_urgent_are_fed_before_what_was_begun_of_others() -> None:
    of = Ticking(step=16)
    slow = of.add(range(200), limit=2, priority=10)
    assert of.tick() == {slow: 16}
    urgent, later = of.add([1, 2, 3], limit=1), of.add(range(500, 520), limit=1, priority=10)
    assert of.tick() == {urgent: 3, slow: 13}
    urgent = of.add(range(300, 320), limit=1)
    assert of.tick() == {urgent: 16}
    assert of.tick() == {urgent: 4, slow: 12}
    while (fed := of.tick()).get(slow) == 16:
        assert later not in fed, "of equals, who was begun goes first"
    of.to_the_end()


def test_nobody_overtakes_one_that_does_not_fit() -> None:
    of = Ticking(pages=10)
    of.add(range(20), limit=12)
    of.tick()
    large = of.add(range(100, 124), limit=2)
    small = of.add([1], limit=1)
    of.tick()
    assert not large.row and not small.row and of.scheduler.rows.free, "a page is there, but not for who is first"
    while not large.row:
        assert small not in of.tick() or large.row
    of.to_the_end()


# Pages run out


def running(of: Ticking) -> list[Sequence]:
    return [one for one in of.scheduler.rows.sequences if one is not None and of.scheduler.rows.active[one.row]]


@pytest.mark.parametrize("priorities", [(0, 0, 0), (0, 2, 1), (2, 1, 0), (1, 1, 0)])
def test_the_youngest_of_the_least_urgent_is_set_back_and_comes_again_before_newcomers(
    priorities: tuple[int, ...],
) -> None:
    of = Ticking(pages=12)
    asks = [of.add([10 + index] * 3, limit=30, priority=priority) for index, priority in enumerate(priorities)]
    order = sorted(asks, key=lambda one: (one.priority, one.arrival))
    while not of.scheduler.preemptions:
        of.tick()
    assert set(running(of)) == set(order[:-1])
    newcomer = of.add([99] * 3, limit=1, priority=order[-1].priority)
    back = order[-1]
    output = list(back.output)
    assert output
    while not back.row:
        of.tick()
        assert not newcomer.row or back.row
    batch, sequences = next(
        launch for launch in reversed(of.launched) if back in launch[1] and back.sampling in launch[0].admitted
    )
    index = sequences.index(back)
    assert batch.counts[index] == len(output), "its random stream goes on"
    assert order[0] not in of.scheduler.waiting
    of.to_the_end()
    assert all(one.output == [TOKEN] * 30 for one in asks)


def test_the_first_of_the_most_urgent_is_never_set_back() -> None:
    preemptions = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        of = Ticking(pages=int(rng.integers(10, 16)), rows=5, prefix_cache=bool(seed % 2))
        preempt = of.scheduler._preempt

        def watched(sequence: Sequence, of: Ticking = of, preempt: Any = preempt) -> None:
            others = [one for one in running(of) if one is not sequence]
            assert min((one.priority, one.arrival) for one in others) < (sequence.priority, sequence.arrival)
            preempt(sequence)

        of.scheduler._preempt = watched  # type: ignore[method-assign]
        for _ in range(12):
            prompt = rng.integers(0, 3, rng.integers(1, 20)).tolist()
            of.add(prompt, limit=int(rng.integers(1, 20)), priority=int(rng.integers(0, 3)))
        of.launch()
        while not of.scheduler.idle:
            of.launch()
            of.commit()
        preemptions += of.scheduler.preemptions
        of.scheduler.check_idle()
    assert preemptions > 30


def test_a_row_that_waits_for_the_page_of_one_in_flight_misses_a_step_and_no_token() -> None:
    of = Ticking(pages=6)
    first, second = of.add([1] * 4, limit=17), of.add([2] * 4, limit=17)
    missed = 0
    of.launch()
    while not of.scheduler.idle:
        fed = of.launch()
        missed += first not in fed and first in running(of) and len(first.output) < 15
        of.commit()
    assert missed, "what was set back is in flight then, and its pages with it"
    assert of.scheduler.preemptions and second.output == first.output == [TOKEN] * 17
    assert of.scheduler.zombies_total == 0, "nobody ended for that"


def test_no_newcomer_is_let_in_for_whom_another_is_set_back_at_once() -> None:
    """Each that runs may need a page next."""
    of = Ticking(pages=9)
    asks = [of.add([index] * 4, limit=5) for index in range(4)]
    of.to_the_end()
    assert of.scheduler.preemptions == 0
    assert all(len(one.output) == 5 for one in asks)


def test_penalties_are_told_what_was_sampled_before() -> None:
    of = Ticking(pages=8, prefix_cache=False)
    asks = [of.add([index] * 4, limit=20) for index in range(2)]
    for one in asks:
        one.sampling.presence_penalty = 1.0
    while not of.scheduler.preemptions:
        of.tick()
    back = asks[1]
    before = len(back.output)
    assert back.sampling.output == ()
    while not back.row:
        of.tick()
    assert back.sampling.output == (TOKEN,) * before


def test_what_is_scored_is_scored_once() -> None:
    of = Ticking(pages=14, step=8)
    first = of.add(range(100, 108), limit=24)
    scored = of.add(range(1, 40), limit=1, prompt_logprobs=0)
    while not of.scheduler.preemptions:
        of.tick()
        if of.scheduler.running == 2 and len(scored.prompt_scores) >= 16:
            of.scheduler._preempt(scored)
    assert 16 <= len(scored.prompt_scores) < 38
    of.to_the_end()
    assert [score.token_id for score in scored.prompt_scores.read()] == list(range(2, 40))
    assert sum(len(s.targets) for batch, _ in of.launched for s in batch.scored) == 38
    assert first.output == [TOKEN] * 24


# Pages that are shared


def test_a_prompt_that_begins_like_another_is_not_computed_again() -> None:
    of = Ticking()
    first = of.add(range(20), limit=2)
    of.to_the_end()
    again, longer, other = of.add(range(20), limit=2), of.add(range(30), limit=2), of.add(range(1, 21), limit=2)
    assert of.tick() == {again: 4, longer: 10, other: 20}, "its last token is computed always"
    assert [one.cached for one in (first, again, longer, other)] == [0, 16, 20, 0]
    of.to_the_end()


def test_an_answer_is_there_for_the_next_turn() -> None:
    of = Ticking()
    first = of.add(range(10), limit=15)
    of.to_the_end()
    turn = [*range(10), *first.output, 1, 2, 3]
    second = of.add(turn, limit=1)
    assert of.tick() == {second: len(turn) - 24}, "24 tokens have been fed, the last one of the answer has not"
    assert second.cached == 24


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("step", [8, 16, 64])
def test_those_that_come_together_compute_a_prompt_once(others: int, step: int) -> None:
    of = Ticking(step=step, rows=8)
    siblings = [of.add(range(42), limit=3, namespace="request") for _ in range(others + 1)]
    behind = of.add([5], limit=1)
    steps = of.to_the_end()
    assert [sum(fed.get(one, 0) for fed in steps) for one in siblings] == [44] + [44 - 40] * others
    assert all(one.output == [TOKEN] * 3 for one in siblings)
    first = next(index for index, fed in enumerate(steps) if behind in fed)
    assert first <= -(-42 // step), "who has nothing to wait for does not wait with them"
    assert len(of.scheduler.cache) == 0, "what a request's own is goes with it"


def test_who_waits_for_a_page_keeps_its_place() -> None:
    of = Ticking(rows=2)
    leader, follower, behind = of.add(range(30), limit=9), of.add(range(30), limit=9), of.add([1], limit=1)
    of.tick()
    assert not follower.row and not behind.row, "the second row is the follower's"
    of.tick()
    assert follower.row and follower.cached == 28 and leader.row
    of.to_the_end()


def test_who_follows_one_that_goes_away_goes_on_alone() -> None:
    of = Ticking(step=8)
    leader, follower = of.add(range(30), limit=2), of.add(range(30), limit=2)
    of.tick()
    of.tick()
    assert not follower.row
    of.scheduler.ends.abort(leader)
    assert of.tick() == {follower: 8}
    assert follower.cached == 16, "what had been computed by then is there"
    of.to_the_end()


def test_nobody_follows_one_who_is_slower() -> None:
    of = Ticking(step=16)
    slow = of.add(range(100), limit=1, priority=10)
    assert of.tick() == {slow: 16}
    urgent = of.add(range(90), limit=1)
    assert of.tick() == {urgent: 16} and urgent.cached == 16
    follower = of.add(range(100), limit=1)
    assert of.tick() == {urgent: 16} and not follower.row
    of.to_the_end()
    assert follower.cached == 88
    of = Ticking(step=2000)
    scored, other, third = (of.add(range(900), limit=1, prompt_logprobs=top) for top in (0, None, None))
    assert of.tick() == {scored: 512, other: 900}
    assert of.tick() == {scored: 388, third: 4}, "of the one that is not scored"
    of.to_the_end()
    scored, other = (of.add(range(500, 900), limit=1, prompt_logprobs=top) for top in (0, None))
    assert of.tick() == {scored: 400} and not other.row, "scored in one step as well"
    of.to_the_end()


def test_namespaces_share_nothing() -> None:
    of = Ticking()
    of.add(range(20), limit=1)
    of.to_the_end()
    kept = len(of.scheduler.cache)
    private = [of.add(range(20), limit=30, namespace="one") for _ in range(2)]
    of.tick()
    assert of.tick() == {private[0]: 1, private[1]: 4}
    other = of.add(range(20), limit=1, namespace="other")
    shared = of.add(range(20), limit=1)
    of.tick()
    assert (other.cached, shared.cached, private[1].cached) == (0, 16, 16)
    of.to_the_end()
    assert len(of.scheduler.cache) == kept


def test_without_a_cache_only_siblings_share() -> None:
    of = Ticking(prefix_cache=False)
    for _ in range(2):
        one = of.add(range(20), limit=1)
        assert of.tick() == {one: 20}
        assert of.scheduler.pool.used == 0
    siblings = [of.add(range(20), limit=5, namespace="mine") for _ in range(2)]
    of.to_the_end()
    assert siblings[1].cached == 16 and of.scheduler.pool.used == 0


def test_who_asks_for_scores_takes_nothing_from_the_cache_and_gives_it() -> None:
    of = Ticking()
    of.add(range(20), limit=1)
    of.to_the_end()
    scored, other = of.add(range(20), limit=1, prompt_logprobs=0), of.add(range(50, 70), limit=1, prompt_logprobs=0)
    assert of.tick() == {scored: 20, other: 20}
    assert scored.cached == 0
    again = of.add(range(50, 70), limit=1)
    of.tick()
    assert again.cached == 16


def test_the_cache_makes_room() -> None:
    of = Ticking(pages=12)
    for index in range(10):
        one = of.add(range(100 * index, 100 * index + 30), limit=9)
        of.to_the_end()
        assert one.output == [TOKEN] * 9
    assert of.scheduler.preemptions == 0
    assert of.scheduler.pool.free + of.scheduler.cache.idle == 12


def test_pages_with_a_fault_are_kept_for_nobody() -> None:
    of = Ticking()
    bad, other = of.add(range(20), limit=5), of.add(range(100, 120), limit=5)
    of.launch()
    of.launch()
    sharing = of.add(range(20), limit=5)
    of.commit(faulty=np.array([True, False]))
    assert isinstance(bad.error, ModelError) and not bad.output
    of.commit()
    of.tick()
    assert sharing.cached == 0
    assert len(other.output) == 3
    of.to_the_end()
    again = of.add(range(100, 120), limit=1)
    of.tick()
    assert again.cached == 16, "another one's are sound"


def test_a_processor_that_fails_ends_its_own_sequence() -> None:
    of = Ticking()

    def processor(output: object, logits: object) -> None:
        raise AssertionError("no device calls it here")

    asks = [of.add([index], limit=5, processor=processor) for index in range(3)]
    of.launch()
    assert of.launched[-1][0].late.all()
    error = ValueError("the processor's own")
    of.commit(errors={1: error})
    assert asks[1].error is error and not asks[1].output
    of.to_the_end()
    assert [len(one.output) for one in asks] == [5, 0, 5]


# What is not there any more, and what waits, is cheap


def test_many_stop_ids_cost_others_nothing_afterwards() -> None:
    of = Ticking()
    stays = of.add([1], limit=20, stop_ids=frozenset({500}))
    many = [of.add([index], limit=index, stop_ids=frozenset(range(100, 100 + 32 * index))) for index in (2, 3)]
    of.tick()
    assert of.scheduler.rows.stop_ids.shape[1] == 96
    of.tick()
    of.tick()
    assert all(one.finalized for one in many)
    assert of.scheduler.rows.stop_ids.shape[1] == 4
    of.tick(token=500)
    assert stays.finish_reason == "stop"


def test_thousands_that_wait_are_not_looked_at() -> None:
    of = Ticking(rows=1)
    of.scheduler._check = False
    first = of.add([1], limit=900)
    asks = [of.add([index % 1000], limit=1) for index in range(5000)]
    looked = 0
    iterate = type(of.scheduler.waiting).__iter__

    def counted(self: Any) -> Any:
        nonlocal looked
        for one in iterate(self):
            looked += 1
            yield one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(of.scheduler.waiting), "__iter__", counted)
        for one in asks[::-2]:
            of.scheduler.ends.abort(one)
        for _ in range(50):
            assert first in of.tick()
    assert looked <= 100
    assert len(of.scheduler.waiting) == 2500
    assert PAGE * len(of.scheduler.tables.pages(first.row)) >= 50


def test_those_who_wait_for_pages_are_looked_at_once_in_a_step() -> None:
    of = Ticking(rows=201, step=8)
    of.scheduler._check = False
    asks = [of.add(range(100), limit=1) for _ in range(201)]
    looked = 0
    iterate = type(of.scheduler.waiting).__iter__

    def counted(self: Any) -> Any:
        nonlocal looked
        for one in iterate(self):
            looked += 1
            yield one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(of.scheduler.waiting), "__iter__", counted)
        for _ in range(10):
            assert of.tick() == {asks[0]: 8}
    assert looked <= 201 * 10
