"""Random schedules on the simulated device, and what must hold whatever the schedule is.

Time is turns of the event loop (``asyncio.sleep(0)``), so a schedule is the same every time it runs.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import strategies as st

from aphoton import Engine, EngineDead, Piece, SimCosts, SimModel
from aphoton.device.base import Results
from aphoton.device.sim import scripted_token
from aphoton.scheduler import Scheduler, Sequence
from aphoton.scheduler.ends import Ends
from aphoton.scheduler.step import Step

VOCAB = 24
"""Tokens that the script uses: few, so that ends are frequent."""

EOS = 0

STEMS = tuple(tuple(random.Random(seed).randrange(VOCAB) for _ in range(12)) for seed in range(3))
"""What prompts begin with: few, so that they share pages, and not all of them."""


@dataclass(frozen=True)
class Ask:
    """One request of a schedule.

    :ivar arrive: turns before it is submitted.
    :ivar leave: how its consumer behaves: reads all, is cancelled ``patience`` turns after it arrived, closes the
        stream after ``patience`` pieces, drops it then, or runs under `generate` and reads nothing until the end.
    :ivar slow: turns that the consumer takes over each piece.
    """

    arrive: int
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    leave: Literal["read", "cancel", "close", "drop", "generate", "cancel generate"] = "read"
    patience: int = 0
    slow: int = 0

    def expected(self) -> list[int]:
        """What it must get if nothing ends it early: the script, without any engine."""
        history, output = list(self.prompt), []
        while len(output) < self.max_tokens:
            token = scripted_token(tuple(history), self.seed or 0, VOCAB)
            if len(output) < self.min_tokens and token == EOS and not self.ignore_eos:
                token = (token + 1) % VOCAB
            output.append(token)
            history.append(token)
            if token == EOS and not self.ignore_eos:
                break
        return output


@dataclass(frozen=True)
class Schedule:
    """:ivar fault: the call of the device, or the commit, that raises, counted from 1; None: none does."""

    asks: tuple[Ask, ...]
    depth: Literal[1, 2]
    max_rows: int
    pages: int
    page_size: int
    max_step_tokens: int = 64
    prefix_cache: bool = True
    max_waiting: int = 1000
    turns: tuple[int, ...] = (1,)
    fault: int | None = None


@dataclass
class Outcome:
    pieces: list[Piece] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    terminals: int = 0
    error: BaseException | None = None
    cancelled: bool = False


small = st.integers(0, 12)

asks = st.builds(
    Ask,
    arrive=st.integers(0, 30),
    prompt=st.builds(
        lambda stem, length, tail: (stem[:length] + tuple(tail))[:14],
        st.sampled_from(STEMS),
        st.integers(0, 12),
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
    ),
    max_tokens=st.integers(1, 20),
    ignore_eos=st.booleans(),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    leave=st.sampled_from(["read", "read", "cancel", "close", "drop", "generate", "cancel generate"]),
    patience=small,
    slow=st.sampled_from([0, 0, 0, 3, 9]),
).flatmap(
    lambda ask: st.integers(0, ask.max_tokens).map(
        lambda minimum: Ask(**{**ask.__dict__, "min_tokens": minimum if minimum % 3 == 0 else 0})
    )
)

schedules = st.builds(
    Schedule,
    asks=st.lists(asks, min_size=1, max_size=10).map(tuple),
    depth=st.sampled_from([1, 2, 2, 2]),
    max_rows=st.integers(1, 5),
    pages=st.integers(9, 30),
    page_size=st.sampled_from([4, 8]),
    max_step_tokens=st.sampled_from([1, 3, 16, 64]),
    prefix_cache=st.booleans(),
    max_waiting=st.sampled_from([0, 1, 1000]),
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
    fault=st.none(),
)

faulty_schedules = st.builds(
    lambda schedule, fault: Schedule(**{**schedule.__dict__, "fault": fault}), schedules, st.integers(1, 60)
)


def random_prompt(rng: random.Random) -> tuple[int, ...]:
    tail = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 14)))
    return (rng.choice(STEMS)[: rng.randint(0, 12)] + tail)[:14]


def random_schedule(seed: int) -> Schedule:
    """The same from a plain generator: hypothesis shrinks what it finds, this finds more in the same time."""
    rng = random.Random(seed)

    def ask() -> Ask:
        most = rng.randint(1, 20)
        return Ask(
            arrive=rng.randint(0, 30),
            prompt=random_prompt(rng),
            max_tokens=most,
            min_tokens=rng.choice((0, 0, rng.randint(0, most))),
            ignore_eos=rng.random() < 0.5,
            seed=rng.choice((None, rng.randint(0, 5))),
            leave=rng.choice(("read", "read", "cancel", "close", "drop", "generate", "cancel generate")),
            patience=rng.randint(0, 12),
            slow=rng.choice((0, 0, 0, 3, 9)),
        )

    return Schedule(
        asks=tuple(ask() for _ in range(rng.randint(1, 10))),
        depth=rng.choice((1, 2, 2, 2)),
        max_rows=rng.randint(1, 5),
        pages=rng.randint(9, 30),
        page_size=rng.choice((4, 8)),
        max_step_tokens=rng.choice((1, 3, 16, 64)),
        prefix_cache=rng.random() < 0.7,
        max_waiting=rng.choice((0, 1, 1000)),
        turns=tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 5))),
        fault=rng.choice((None, None, rng.randint(1, 60))),
    )


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def run(schedule: Schedule) -> list[Outcome]:
    """Run a schedule and assert every invariant on the way; the outcome of each request."""
    calls = 0

    def probe(call: str) -> None:
        nonlocal calls
        calls += 1
        if calls == schedule.fault:
            raise OSError(f"injected in {call}")

    ends: dict[Sequence, int] = {}
    finish, commit = Ends.finish, Scheduler.commit

    def probed(self: Scheduler, step: Step, results: Results) -> None:
        probe("commit, before")
        commit(self, step, results)
        probe("commit, after")

    def counted(self: Ends, sequence: Sequence, *args: object, **kwargs: object) -> None:
        ends[sequence] = ends.get(sequence, 0) + 1
        finish(self, sequence, *args, **kwargs)  # type: ignore[arg-type]

    model = SimModel(
        script=lambda history, seed, vocab: scripted_token(history, seed, VOCAB),
        vocab_size=256,
        eos_token_ids=(EOS,),
        turns=schedule.turns,
        probe=probe,
        costs=SimCosts(),
        max_model_len=100,
    )
    engine = Engine(
        model,
        pipeline_depth=schedule.depth,
        max_rows=schedule.max_rows,
        kv_pages=schedule.pages,
        page_size=schedule.page_size,
        max_step_tokens=schedule.max_step_tokens,
        prefix_cache=schedule.prefix_cache,
        max_waiting=schedule.max_waiting,
    )
    outcomes = [Outcome() for _ in schedule.asks]
    Ends.finish, Scheduler.commit = counted, probed  # type: ignore[method-assign]
    try:
        await engine.start()
        consumers = [
            asyncio.create_task(_consume(engine, ask, outcome))
            for ask, outcome in zip(schedule.asks, outcomes, strict=True)
        ]
        cancellers = [
            asyncio.create_task(_cancel(consumer, ask.arrive + ask.patience))
            for ask, consumer in zip(schedule.asks, consumers, strict=True)
            if ask.leave.startswith("cancel")
        ]
        async with asyncio.timeout(10):  # real time: only a schedule that hangs gets there
            await asyncio.gather(*consumers, *cancellers)
        if schedule.fault is None:
            await _idle(engine)
        await engine.aclose()
    finally:
        Ends.finish, Scheduler.commit = finish, commit  # type: ignore[method-assign]
    assert all(count == 1 for count in ends.values()), "exactly one end each"
    for ask, outcome in zip(schedule.asks, outcomes, strict=True):
        _judge(ask, outcome, faulty=schedule.fault is not None)
    return outcomes


async def _consume(engine: Engine, ask: Ask, outcome: Outcome) -> None:
    await turns(ask.arrive)
    options = {
        "max_tokens": ask.max_tokens,
        "min_tokens": ask.min_tokens,
        "ignore_eos": ask.ignore_eos,
        "temperature": 0.0 if ask.seed is None else 1.0,
        "seed": ask.seed,
    }
    try:
        if "generate" in ask.leave:
            done = await engine.generate(list(ask.prompt), **options)
            outcome.tokens = list(done.token_ids)
            outcome.terminals = 1
            return
        stream = engine.stream(list(ask.prompt), **options)
        async for piece in stream:
            assert not outcome.terminals, "a token after the end"
            outcome.pieces.append(piece)
            outcome.tokens += piece.token_ids
            outcome.terminals += piece.finish_reason is not None
            if ask.leave in ("close", "drop") and len(outcome.pieces) > ask.patience:
                break
            await turns(ask.slow)
        if ask.leave == "close":
            await stream.aclose()
        del stream  # dropped: nobody else holds it
    except asyncio.CancelledError:
        outcome.cancelled = True
    except (EngineDead, OSError) as error:
        outcome.error = error


async def _cancel(task: asyncio.Task[None], after: int) -> None:
    await turns(after)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _idle(engine: Engine) -> None:
    """Whoever is left ends within two ticks, and then nothing is held."""
    limit = 2 * (max(engine._model.turns) + 2) + 4  # type: ignore[union-attr]
    for _ in range(limit):
        stats = engine.stats()
        if not (stats.running or stats.waiting or stats.zombies or stats.pages_used):
            break
        await asyncio.sleep(0)
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.zombies == stats.pages_used == 0
    assert stats.pages_free + stats.pages_cached == engine.limits.pages - 1
    assert engine._scheduler is not None and engine._pipeline is not None
    engine._scheduler.check_idle()
    assert not engine._pipeline.inflight and all(slot.free for slot in engine._pipeline.slots)


def _judge(ask: Ask, outcome: Outcome, *, faulty: bool) -> None:
    expected = ask.expected()
    assert outcome.tokens == expected[: len(outcome.tokens)], "the script's tokens, in order"
    if outcome.error is not None:
        assert faulty and isinstance(outcome.error, EngineDead)
        assert isinstance(outcome.error.__cause__, OSError)
        assert not outcome.terminals
    elif outcome.cancelled:
        assert ask.leave.startswith("cancel")  # perhaps between the last piece and the iterator's end
    elif ask.leave in ("close", "drop") and not outcome.terminals:
        assert len(outcome.pieces) > ask.patience
    else:
        assert outcome.terminals == 1
        assert outcome.tokens == expected
