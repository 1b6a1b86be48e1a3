"""Every way for a request to be given up, at every moment of its life, in both depths of the pipeline.

The simulated device tells each of its calls as it begins, so a test acts in the middle of a tick, and tries every call
in turn. A second request runs beside the first throughout: ticks go on, and it must not notice.
"""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import anyio
import pytest
from engine.machines import Counting, Gate, machine
from engine.simulated import Probe
from engine.waiting import assert_nothing_held, idle, until

from aphoton import Completion, CompletionStream, Engine, Piece, SimModel
from aphoton.device.sim import SimDevice, scripted_token
from aphoton.scheduler import Sequence

VOCAB, EOS = 300, 0
LENGTH = 4
"""Tokens of the request that is given up, the end token included."""
ENDLESS, STAYS = 1, 24
"""First token of the prompt of the request that stays, and its length."""


def script(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
    if history[0] != ENDLESS and len(history) == 1 + LENGTH:
        return EOS
    return 2 + scripted_token(history, seed, VOCAB - 2)


def expected(prompt: int, count: int) -> tuple[int, ...]:
    history = [prompt, 7]
    for _ in range(count):
        history.append(script(tuple(history), 0, VOCAB))
    return tuple(history[2:])


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """The garbage collector looks at what these tests make, and not at all that has been imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# The consumers. Each gives up when `Consumer.give_up` is called, and says how it ended.


@dataclass
class Consumer:
    """A request that will be given up.

    :ivar pieces: what it has been given.
    :ivar given_up: it has acted.
    :ivar left: to be called when it has left, by those that do so later.
    """

    engine: Engine
    pieces: list[Piece] = field(default_factory=list)
    done: Completion | None = None
    cancelled: bool = False
    given_up: bool = False
    left: Callable[[], None] = lambda: None
    task: "asyncio.Task[None] | None" = None
    prompt: str | list[int] = field(default_factory=lambda: [2, 7])

    def start(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.consume()
        except asyncio.CancelledError:
            self.cancelled = True

    def stream(self) -> CompletionStream:
        return self.engine.stream(self.prompt, max_tokens=50)

    async def consume(self) -> None:
        async for piece in self.stream():
            self.pieces.append(piece)

    def give_up(self) -> None:
        assert self.task is not None
        self.given_up = True
        self.task.cancel()


class CancelledGenerate(Consumer):
    async def consume(self) -> None:
        self.done = await self.engine.generate(self.prompt, max_tokens=50)


class CancelledCompletion(Consumer):
    async def consume(self) -> None:
        async with self.stream() as stream:
            self.done = await stream.completion()


class CancelledWhileHeld(Consumer):
    """Somebody else holds the stream: that it was dropped cannot be what ends it."""

    async def consume(self) -> None:
        self.held = self.stream()
        async for piece in self.held:
            self.pieces.append(piece)


class CancelledCompletionWhileHeld(Consumer):
    async def consume(self) -> None:
        self.held = self.stream()
        self.done = await self.held.completion()


class CancelledInItsBody(Consumer):
    """While it does something else than awaiting the stream, which nobody but its loop holds."""

    async def consume(self) -> None:
        async for piece in self.stream():
            self.pieces.append(piece)
            await asyncio.Event().wait()


class CancelledInItsContext(Consumer):
    """The same, of a stream that somebody else holds: the context around the loop ends it."""

    async def consume(self) -> None:
        self.held = self.stream()
        async with self.held:
            async for piece in self.held:
                self.pieces.append(piece)
                await asyncio.Event().wait()


class TimedOut(Consumer):
    async def consume(self) -> None:
        try:
            async with asyncio.timeout(None) as self.limit:
                await super().consume()
        except TimeoutError:
            self.cancelled = True

    def give_up(self) -> None:
        self.given_up = True
        if self.task is not None and not self.task.done():
            self.limit.reschedule(0)


class ScopeCancelled(Consumer):
    async def consume(self) -> None:
        with anyio.CancelScope() as self.scope:
            await super().consume()
        self.cancelled = self.scope.cancelled_caught

    def give_up(self) -> None:
        self.given_up = True
        self.scope.cancel()


class Closed(Consumer):
    """By another task, while it is awaited."""

    async def consume(self) -> None:
        self.held = self.stream()
        async for piece in self.held:
            self.pieces.append(piece)

    def give_up(self) -> None:
        self.given_up = True
        self.closing = asyncio.create_task(self.held.aclose())


class ClosedAtOnce(Closed):
    """In the midst of the tick, not in a turn of its own."""

    def give_up(self) -> None:
        self.given_up = True
        with pytest.raises(StopIteration):
            self.held.aclose().send(None)


class Broke(Consumer):
    """Leaves ``async for`` at the next piece."""

    async def consume(self) -> None:
        async for piece in self.stream():
            self.pieces.append(piece)
            if self.given_up:
                self.left()
                break

    def give_up(self) -> None:
        self.given_up = True


class LeftTheContext(Broke):
    async def consume(self) -> None:
        async with self.stream() as stream:
            async for piece in stream:
                self.pieces.append(piece)
                if self.given_up:
                    self.left()
                    break
            self.kept = stream  # held, and ended all the same


class Dropped(Consumer):
    """The last reference to a stream that runs goes away."""

    async def consume(self) -> None:
        self.held: list[CompletionStream] = [self.stream()]
        await self.held[0].__aenter__()

    def give_up(self) -> None:
        self.given_up = True
        self.held.clear()


class Collected(Dropped):
    """The same, in a cycle that the garbage collector finds, in the midst of the tick."""

    def give_up(self) -> None:
        self.given_up = True
        cycle: list[object] = [*self.held]
        cycle.append(cycle)
        self.held.clear()
        del cycle
        gc.collect()


class DroppedInAThread(Dropped):
    def give_up(self) -> None:
        self.given_up = True
        thread = threading.Thread(target=self.held.clear)
        thread.start()
        thread.join()


WAYS: list[type[Consumer]] = [
    Consumer,
    CancelledGenerate,
    CancelledCompletion,
    CancelledWhileHeld,
    CancelledCompletionWhileHeld,
    CancelledInItsBody,
    CancelledInItsContext,
    TimedOut,
    ScopeCancelled,
    Closed,
    ClosedAtOnce,
    Broke,
    LeftTheContext,
    Dropped,
    Collected,
    DroppedInAThread,
]
ONCE_IT_RUNS = (Dropped, Collected, DroppedInAThread)
"""Ways of a stream that has been submitted: until then its task holds it."""
AT_THE_NEXT_PIECE = (Broke, LeftTheContext)


# The moments


def moment(engine: Engine, call: str) -> str:
    """Where in its life the request is."""
    scheduler = engine._scheduler
    assert scheduler is not None
    if engine._door:
        return "at the door"
    for sequence in scheduler.waiting:
        if sequence.prompt[0] == 2:
            return "in the queue"
    for row, sequence in enumerate(scheduler.rows.sequences):
        if sequence is not None and sequence.prompt[0] == 2:
            if sequence.finalized:
                return "as a zombie"
            if not sequence.output:
                return "during prefill"
            if call == "results" and len(sequence.output) == LENGTH - 1:
                return "in the tick of its end"
            return f"in flight in {scheduler.rows.refs[row]}"
    return "gone"


async def give_up_at(
    calls: int, way: type[Consumer], depth: Literal[1, 2], settings: dict[str, int], ends: dict[Sequence, int]
) -> str:
    """Give a request up in the device's ``calls``-th call after it was submitted; the moment that this was."""
    ends.clear()
    probe = Probe()
    seen: list[str] = []
    freed_by: list[int] = []
    async with Engine(
        # Several turns a tick, as a device that takes its time: what is scheduled at once happens in the same tick.
        SimModel(script=script, vocab_size=VOCAB, eos_token_ids=(EOS,), probe=probe, turns=(5,)),
        pipeline_depth=depth,
        **settings,
    ) as engine:
        pipeline = engine._pipeline
        assert pipeline is not None
        stays = asyncio.create_task(engine.generate([ENDLESS, 7], max_tokens=STAYS))
        await until(lambda: engine.stats().tokens >= 3)
        consumer = way(engine)
        consumer.left = lambda: freed_by.append(pipeline.steps + 2)

        def watch(call: str) -> None:
            if calls == probe.total - begin:
                seen.append(moment(engine, call))
                consumer.give_up()
                if way not in AT_THE_NEXT_PIECE:
                    consumer.left()
            elif freed_by and pipeline.steps >= freed_by[0]:
                stats = engine.stats()
                assert stats.running <= 1 and not stats.waiting and not stats.zombies, (seen, call)
                assert consumer.task is not None and consumer.task.done(), (seen, call)

        if way in ONCE_IT_RUNS:
            consumer.start()
            await asyncio.sleep(0)
        begin = probe.total
        probe.every = watch
        if way not in ONCE_IT_RUNS:
            consumer.start()
        done = await stays
        assert consumer.given_up
        await idle(engine)
        assert_nothing_held(engine)
    assert done.token_ids == expected(ENDLESS, STAYS), "the other one has not noticed"
    assert set(ends.values()) == {1} and len(ends) <= 2, "one end each"
    _judge(consumer, seen[0])
    return seen[0]


def _judge(consumer: Consumer, at: str) -> None:
    """One terminal event at most: an end token's, an abort's, or the cancellation itself; and the script's tokens."""
    terminals = [piece.finish_reason for piece in consumer.pieces if piece.finish_reason is not None]
    tokens = tuple(token for piece in consumer.pieces for token in piece.token_ids)
    assert tokens == expected(2, LENGTH)[: len(tokens)]
    assert len(terminals) <= 1
    if terminals:
        assert consumer.pieces[-1].finish_reason is not None, "nothing after the end"
        assert not consumer.cancelled
    if terminals == ["stop"] or (consumer.done is not None and consumer.done.finish_reason == "stop"):
        assert at in ("in the tick of its end", "as a zombie", "gone") or type(consumer) in AT_THE_NEXT_PIECE
    elif isinstance(consumer, Closed):
        assert terminals == ["abort"] or at == "at the door"
    elif type(consumer) in (Broke, LeftTheContext):
        assert not terminals and tokens
    elif not isinstance(consumer, Dropped):
        assert consumer.cancelled
        assert consumer.done is None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", WAYS)
async def test_at_every_call_of_the_device(
    way: type[Consumer], depth: Literal[1, 2], ends: dict[Sequence, int]
) -> None:
    seen = {await give_up_at(calls, way, depth, {"max_rows": 2}, ends) for calls in range(1, 3 * (LENGTH + 3))}
    assert {"during prefill", "in flight in 1", "gone"} <= seen
    assert depth == 1 or {"in flight in 2", "in the tick of its end", "as a zombie"} <= seen


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", [way for way in WAYS if way not in AT_THE_NEXT_PIECE])
async def test_in_the_queue(way: type[Consumer], depth: Literal[1, 2], ends: dict[Sequence, int]) -> None:
    for calls in range(1, 7):
        assert await give_up_at(calls, way, depth, {"max_rows": 1}, ends) == "in the queue"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", [way for way in WAYS if way not in (*AT_THE_NEXT_PIECE, *ONCE_IT_RUNS)])
async def test_at_the_door(way: type[Consumer], depth: Literal[1, 2], ends: dict[Sequence, int]) -> None:
    for calls in range(1, 7):
        assert await give_up_at(calls, way, depth, {"max_rows": 1, "max_waiting": 0}, ends) == "at the door"


@pytest.mark.parametrize("way", [way for way in WAYS if way not in (*AT_THE_NEXT_PIECE, *ONCE_IT_RUNS)])
async def test_while_its_text_is_tokenized(
    way: type[Consumer], ends: dict[Sequence, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread, which cannot be stopped: the request ends, and what the thread brings is dropped."""
    gate = Gate()
    async with machine(monkeypatch, Counting(), tokenizer=gate) as engine:
        consumer = way(engine)
        consumer.prompt = "x" * 5000
        stays = engine.stream([ENDLESS], max_tokens=200)
        await anext(stays)
        consumer.start()
        await until(lambda: gate.entered.is_set())
        steps = engine.stats().steps
        consumer.give_up()
        await until(lambda: consumer.task.done())
        assert engine.stats().steps <= steps + 2
        assert not gate.go.is_set() and consumer.pieces == []
        gate.go.set()
        assert len((await stays.completion()).token_ids) == 200
        await idle(engine)
        assert engine.stats().tokens == 200
    assert set(ends.values()) == {1} and len(ends) == 1, "it never became a sequence"


# Garbage in the midst of a tick


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reads", range(1, 40))
async def test_garbage_that_is_found_in_the_midst_of_anything(
    reads: int, depth: Literal[1, 2], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collections begin wherever memory is allocated: here, where the scheduler and the pipeline read the clock."""
    cycle: list[object] = []
    left = reads
    now = SimDevice.now

    def counted(self: SimDevice) -> float:
        nonlocal left
        left -= bool(cycle)
        if cycle and not left:
            unreachable = cycle.copy()
            unreachable.append(unreachable)
            cycle.clear()
            del unreachable
            gc.collect()
        return now(self)

    monkeypatch.setattr(SimDevice, "now", counted)
    async with Engine(
        SimModel(script=script, vocab_size=VOCAB, eos_token_ids=(EOS,)),
        pipeline_depth=depth,
        max_rows=3,
        page_size=1,
    ) as engine:
        stays = asyncio.create_task(engine.generate([ENDLESS, 7], max_tokens=STAYS))
        garbage = engine.stream([2, 7], max_tokens=50, ignore_eos=True)
        await anext(garbage)
        cycle.append(garbage)
        del garbage
        more = asyncio.create_task(engine.generate([2, 7], max_tokens=10))
        assert (await stays).token_ids == expected(ENDLESS, STAYS)
        assert (await more).token_ids == expected(2, LENGTH)
        assert not cycle
        await idle(engine)
