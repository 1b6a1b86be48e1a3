"""Random crowds of sequences on the simulated device, with all that a sequence can ask; the pipeline without an engine.

Time is turns of the event loop (``asyncio.sleep(0)``), but for maskers that work in a thread.
"""

import asyncio
import random
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scheduler.scenario import STEMS, turns

from aphoton import SimModel
from aphoton.device.sim import SimDevice, scripted_token
from aphoton.observe import Timeline
from aphoton.sampling import RowSampling
from aphoton.scheduler import Pipeline, Scheduler, Sequence

VOCAB = 40
LONGEST = 64
STOP = 1


class RuleError(Exception):
    """A masker's own."""


@dataclass
class Rules:
    """A masker whose masks depend on all tokens that it was told of, and who notices what is not told, or twice.

    :ivar ends: tokens after which nothing may follow.
    :ivar fails: the fill, or the accept, that raises, counted in tokens.
    """

    seed: int
    cost: float = 0.0
    ends: int = 1000
    fails: tuple[Literal["fill", "accept"], int] | None = None
    accepted: list[int] = field(default_factory=list)
    filled: bool = False
    busy: bool = False

    def allowed(self, history: tuple[int, ...]) -> NDArray[np.bool_]:
        seen = (self.seed, *history)
        may = np.array([hash((*seen, token)) % 4 == 0 for token in range(VOCAB)])
        may[hash(seen) % VOCAB] = True
        return may

    def fill(self, mask: NDArray[np.uint32]) -> None:
        assert not self.busy, "not for two threads at once"
        self.busy = True
        try:
            if self.fails == ("fill", len(self.accepted)):
                raise RuleError(f"no mask after {len(self.accepted)}")
            bits = np.zeros(len(mask) * 32, np.bool_)
            bits[:VOCAB] = self.allowed(tuple(self.accepted))
            mask[:] = np.packbits(bits, bitorder="little").view(np.uint32)
            self.filled = True
        finally:
            self.busy = False

    def accept(self, token: int) -> bool:
        assert self.filled and not self.busy, "a token is sampled with a mask of its own"
        assert self.allowed(tuple(self.accepted))[token], "the mask was this sequence's"
        if self.fails == ("accept", len(self.accepted)):
            raise RuleError(f"not {token}")
        self.filled = False
        self.accepted.append(token)
        return len(self.accepted) >= self.ends


@dataclass(frozen=True)
class Want:
    """One sequence.

    :ivar arrive: turns before it comes; of the same number, together.
    :ivar leave: turns after that when it is aborted; None: never.
    """

    arrive: int
    prompt: tuple[int, ...]
    limit: int
    seed: int = 0
    priority: int = 0
    namespace: Hashable = None
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    stops: bool = False
    rules: tuple[int, bool, int] | None = None
    fails: tuple[Literal["fill", "accept"], int] | None = None
    leave: int | None = None

    def masker(self) -> Rules | None:
        if self.rules is None:
            return None
        seed, quick, ends = self.rules
        return Rules(seed, cost=0.0 if quick else 1.0, ends=ends, fails=self.fails)

    def expected(self) -> tuple[list[int], str]:
        """Its tokens and its end when nobody aborts it, without any scheduler."""
        output: list[int] = []
        rules = self.masker()
        while len(output) < self.limit:
            token = scripted_token((*self.prompt, *output), self.seed, VOCAB)
            if rules is not None:
                if self.fails == ("fill", len(output)):
                    return output, "error"
                allowed = np.flatnonzero(rules.allowed(tuple(output)))
                token = int(allowed[np.searchsorted(allowed, token) % len(allowed)])
            output.append(token)
            if rules is not None and self.fails == ("accept", len(output) - 1):
                return output, "error"
            if (self.stops and token == STOP) or (rules is not None and len(output) >= rules.ends):
                return output, "stop"
        return output, "length"


@dataclass(frozen=True)
class Crowd:
    wants: tuple[Want, ...]
    depth: Literal[1, 2] = 2
    max_rows: int = 4
    pages: int = 24
    page_size: int = 4
    max_step_tokens: int = 16
    prefix_cache: bool = True
    turns: tuple[int, ...] = (1,)


@dataclass
class Told:
    """What became of a crowd."""

    sequences: list[Sequence]
    preemptions: int
    steps: int
    tokens_fed: int


def random_crowd(seed: int, *, slow: bool = False) -> Crowd:
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 4, 8))

    def want(arrive: int) -> Want:
        tail = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, rng.randint(1, 12)))))
        rules = None
        fails: tuple[Literal["fill", "accept"], int] | None = None
        if rng.random() < 0.3:
            rules = (rng.randint(0, 3), not slow or rng.random() < 0.5, rng.choice((1, 3, 7, 1000)))
            if rng.random() < 0.2:
                fails = (rng.choice(("fill", "accept")), rng.randint(0, 5))
        return Want(
            arrive=arrive,
            prompt=rng.choice(STEMS)[: rng.randint(0, 12)] + tail,
            limit=rng.choice((0, 1, 2, rng.randint(1, 30), rng.randint(1, 30))),
            seed=rng.randint(0, 2),
            priority=rng.choice((0, 0, 0, -1, 3)),
            namespace=rng.choice((None, None, None, "private", ("other",))),
            prompt_logprobs=rng.choice((None, None, None, 0, 2)),
            logprobs=rng.choice((None, 0)),
            stops=rng.random() < 0.5,
            rules=rules,
            fails=fails,
            leave=rng.randint(0, 25) if rng.random() < 0.2 else None,
        )

    wants: list[Want] = []
    for _ in range(rng.randint(1, 8)):
        new = want(rng.choice((0, rng.randint(0, 30))))
        if wants and rng.random() < 0.3:  # the next turn of a conversation, or an answer that goes another way
            last = rng.choice(wants)
            answer = last.expected()[0][: rng.choice((30, rng.randint(0, 30)))]
            turn = (last.prompt + tuple(answer))[:40] + new.prompt[-1:]
            new = replace(new, prompt=turn, arrive=last.arrive + rng.randint(0, 40), namespace=last.namespace)
        wants += [new] * rng.choice((1, 1, 1, rng.randint(2, 4)))
    largest = max(-(-(len(one.prompt) + max(one.limit, 1) - 1) // page_size) for one in wants)
    return Crowd(
        wants=tuple(wants),
        depth=rng.choice((1, 2, 2, 2)),
        max_rows=rng.randint(1, 6),
        pages=largest + rng.choice((0, 0, 1, rng.randint(0, 10), 100)),
        page_size=page_size,
        max_step_tokens=rng.choice((1, 2, 5, 16, 64)),
        prefix_cache=rng.random() < 0.75,
        turns=tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3))),
    )


async def run_crowd(crowd: Crowd) -> Told:
    """Run a crowd and assert every invariant on the way."""
    model = SimModel(vocab_size=VOCAB, max_model_len=LONGEST, eos_token_ids=(), turns=crowd.turns)
    device = SimDevice(model, pages=crowd.pages + 1, page_size=crowd.page_size, max_rows=crowd.max_rows)
    scheduler = Scheduler(
        device.limits,
        max_rows=crowd.max_rows,
        page_size=crowd.page_size,
        max_step_tokens=crowd.max_step_tokens,
        now=device.now,
        check=True,
    )
    timeline = Timeline()
    pipeline = Pipeline(scheduler, device, depth=crowd.depth, timeline=timeline)
    fed = 0

    def count(phase: str, tokens: int, rows: int) -> None:
        nonlocal fed
        if phase == "launch":
            fed += tokens
            half = -(-crowd.max_step_tokens // 2)
            assert tokens <= max(crowd.max_step_tokens, rows + half), "the step's budget"

    timeline.on_span = lambda span: count(span.phase, span.tokens, span.rows)
    sequences = [_sequence(want, crowd.prefix_cache or want.namespace is not None) for want in crowd.wants]
    maskers = [sequence.masker for sequence in sequences]
    ends: dict[Sequence, int] = dict.fromkeys(sequences, 0)

    def ended(sequence: Sequence) -> None:
        ends[sequence] += 1

    async def live(want: Want, sequence: Sequence) -> None:
        await turns(want.arrive)
        sequence.on_end = lambda: ended(sequence)
        scheduler.add(sequence)
        pipeline.wake()
        if want.leave is not None:
            await turns(want.leave)
            scheduler.ends.abort(sequence)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:  # real time: only what hangs gets there
        running = group.create_task(pipeline.run())
        await asyncio.gather(*(live(*pair) for pair in zip(crowd.wants, sequences, strict=True)))
        pipeline.close()
        await running
    assert set(ends.values()) == {1}, "exactly one end each"
    for want, sequence, masker in zip(crowd.wants, sequences, maskers, strict=True):
        _judge(want, sequence, masker)
    assert scheduler.tokens == sum(len(sequence.output) for sequence in sequences)
    return Told(sequences, scheduler.preemptions, pipeline.steps, fed)


def _sequence(want: Want, cacheable: bool) -> Sequence:
    return Sequence(
        np.array(want.prompt, np.int32),
        limit=want.limit,
        sampling=RowSampling(seed=want.seed, temperature=1.0, logprobs=want.logprobs),
        stop_ids=frozenset({STOP} if want.stops else ()),
        priority=want.priority,
        masker=want.masker(),
        cacheable=cacheable,
        namespace=want.namespace,
        prompt_logprobs=want.prompt_logprobs,
    )


def _judge(want: Want, sequence: Sequence, masker: object) -> None:
    tokens, reason = want.expected()
    if sequence.finish_reason == "abort":
        assert want.leave is not None
        assert sequence.output == tokens[: len(sequence.output)]
    else:
        assert sequence.output == tokens
        assert (sequence.finish_reason or "error") == reason
        assert (reason == "error") == isinstance(sequence.error, RuleError)
        if want.prompt_logprobs is not None and sequence.error is None:
            assert [score.token_id for score in sequence.prompt_scores.read()] == list(want.prompt[1:])
    if isinstance(masker, Rules):
        told = sequence.output
        if sequence.error is not None and want.fails is not None and want.fails[0] == "accept":
            told = told[:-1]  # the token that it did not take
        assert masker.accepted == told, "told of each token once"
    if want.logprobs is not None:
        assert [entry.token_id for entry in sequence.logprobs.read()] == sequence.output
    assert (sequence.first_token_at is None) == (not sequence.output)
    assert sequence.cached < len(want.prompt)
    if want.prompt_logprobs is not None and len(want.prompt) > 1:
        assert not sequence.cached, "all of its prompt is scored"
