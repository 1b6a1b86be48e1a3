"""Several outputs of one prompt."""

import asyncio
from typing import Any, Literal

import pytest
import torch
from engine.machines import VOCAB, machine
from engine.simulated import Probe
from engine.waiting import idle, until
from torch import Tensor

from aphoton import Engine, EngineClosed, EngineOverloaded, ModelError, Piece, SimModel
from aphoton.attention import KVCache
from aphoton.device.sim import scripted_token
from aphoton.models import StepInput
from aphoton.observe import Span
from aphoton.scheduler import Sequence

SAMPLED = {"temperature": 1.0, "seed": 5, "ignore_eos": True}


# What they are


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("device", ["sim", "cpu"])
async def test_each_has_a_stream_of_its_own_whatever_the_crowd(device: str, rows: int, depth: Literal[1, 2]) -> None:
    """More of them than rows wait for each other. The first is what n = 1 gives, and each is what it is elsewhere."""
    model: Any = SimModel() if device == "sim" else "random:tiny"
    dtype: dict[str, Any] = {} if device == "sim" else {"dtype": "float32"}
    async with Engine(model, pipeline_depth=1, max_rows=8, **dtype) as engine:
        alone = await engine.generate([3, 4], max_tokens=12, **SAMPLED)
        expected = await engine.generate([3, 4], max_tokens=12, n=5, **SAMPLED)
        other = await engine.generate([3, 4], max_tokens=12, n=5, **{**SAMPLED, "seed": 6})
    tokens = [output.token_ids for output in expected.outputs]
    assert tokens[0] == alone.token_ids
    assert len({*tokens, *(output.token_ids for output in other.outputs)}) == 10
    async with Engine(model, pipeline_depth=depth, max_rows=rows, **dtype) as engine:
        crowd = [engine.generate([i], max_tokens=5 * i, **SAMPLED) for i in range(1, 4)]
        asked = [engine.generate([3, 4], max_tokens=12, n=n, **SAMPLED) for n in (5, 2)]
        five, two, *_ = await asyncio.gather(*asked, *crowd)
        await idle(engine)
    assert five.outputs == expected.outputs
    assert two.outputs == expected.outputs[:2]
    assert [output.index for output in five.outputs] == [0, 1, 2, 3, 4]
    assert five.token_ids == five.outputs[0].token_ids


async def test_without_a_seed_one_is_drawn_for_all() -> None:
    async def run(n: int) -> list[tuple[int, ...]]:
        async with Engine(SimModel(), seed=3) as engine:
            asks = [await engine.generate([1], n=n, max_tokens=8, temperature=1.0, ignore_eos=True) for _ in range(2)]
            return [output.token_ids for done in asks for output in done.outputs]

    one, three = await run(1), await run(3)
    assert one == [three[0], three[3]], "the second request's seed does not depend on the first one's n"
    assert len(set(three)) == 6


async def test_greedy_outputs_are_the_same(tiny: Engine) -> None:
    done = await tiny.generate("Hello", n=3, max_tokens=9)
    assert {output.token_ids for output in done.outputs} == {(await tiny.generate("Hello", max_tokens=9)).token_ids}


async def test_usage_and_timings(tiny: Engine) -> None:
    done = await tiny.generate([1, 2, 3], n=4, max_tokens=7, **SAMPLED)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 28)
    times = done.timings
    assert times.ttft is not None and times.itl is not None
    assert 0 <= times.queued <= times.ttft <= times.total
    assert 0 < times.itl <= times.total


async def test_each_ends_where_it_ends(tiny: Engine) -> None:
    stops = list(range(0, 512, 9))
    done = await tiny.generate([3], n=8, max_tokens=30, temperature=1.0, seed=1, stop_token_ids=stops, logprobs=1)
    assert len({len(output.token_ids) for output in done.outputs}) > 3
    for output in done.outputs:
        assert output.finish_reason == ("stop" if output.token_ids[-1] % 9 == 0 else "length")
        assert output.stop_reason == (output.token_ids[-1] if output.finish_reason == "stop" else None)
        assert not any(token % 9 == 0 for token in output.token_ids[:-1])
        assert output.logprobs is not None
        assert [entry and entry.token_id for entry in output.logprobs] == list(output.token_ids)


# Pieces


@pytest.mark.parametrize("rows", [2, 8])
async def test_pieces_say_whose_they_are(rows: int) -> None:
    async with Engine(SimModel(), max_rows=rows) as engine:
        stream = engine.stream([3, 4], n=4, max_tokens=20, stop_token_ids=list(range(60)), **SAMPLED)
        pieces: list[Piece] = [piece async for piece in stream]
        done = await stream.completion()
    for output in done.outputs:
        own = [piece for piece in pieces if piece.index == output.index]
        assert "".join(piece.text for piece in own) == output.text
        assert tuple(token for piece in own for token in piece.token_ids) == output.token_ids
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [output.finish_reason]


async def test_whoever_has_news_takes_turns() -> None:
    async with Engine(SimModel(), max_rows=4) as engine:
        async with engine.stream([3], n=4, max_tokens=100, **SAMPLED) as stream:
            while engine.stats().running:
                before = engine.stats().tokens
                await until(lambda before=before: engine.stats().tokens >= before + 8 or not engine.stats().running)
                assert sorted([(await anext(stream)).index for _ in range(4)]) == [0, 1, 2, 3]
        await idle(engine)


async def test_one_that_has_ended_does_not_hold_up_the_others() -> None:
    """All of it is given, however long the others go on."""

    def script(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
        return 0 if seed == 5 and len(history) == 4 else 7

    async with Engine(SimModel(script=script), max_rows=4) as engine:
        stream = engine.stream([3], n=3, max_tokens=200, temperature=1.0, seed=5)
        terminal = []
        async for piece in stream:
            if piece.finish_reason is not None:
                terminal.append((piece.index, piece.finish_reason))
                if piece.index == 0:
                    assert engine.stats().running == 2
        assert terminal[0] == (0, "stop") and sorted(terminal[1:]) == [(1, "length"), (2, "length")]
        assert [len(output.token_ids) for output in (await stream.completion()).outputs] == [4, 200, 200]


# Places


async def test_each_takes_a_place_and_a_request_is_let_in_or_refused_as_a_whole(ends: dict[Sequence, int]) -> None:
    async with Engine(SimModel(eos_token_ids=()), max_rows=2, max_waiting=2, overload="raise") as engine:
        four = asyncio.create_task(engine.generate([1], n=4, max_tokens=5))
        await until(lambda: engine.stats().running)
        with pytest.raises(EngineOverloaded, match="max_waiting: 2"):
            await engine.generate([1], n=3, max_tokens=5)
        assert [len(output.token_ids) for output in (await four).outputs] == [5] * 4
        await idle(engine)
        many = asyncio.create_task(engine.generate([1], n=16, max_tokens=5))
        await until(lambda: engine.stats().running)
        assert engine.stats().waiting == 14
        with pytest.raises(EngineOverloaded):
            await engine.generate([1], max_tokens=5)
        assert [len(output.token_ids) for output in (await many).outputs] == [5] * 16, "an idle engine takes any number"
        await idle(engine)
    assert len(ends) == 4 + 16, "of those refused nobody was let in"


async def test_they_stand_together_at_the_door(ends: dict[Sequence, int]) -> None:
    """More of them than there are places: nobody who came later is let in between, and nobody who came before waits."""
    async with Engine(SimModel(eos_token_ids=()), max_rows=1, max_waiting=0) as engine:
        asked = [
            asyncio.create_task(engine.generate([number], n=n, max_tokens=3, ignore_eos=True))
            for number, n in ((1, 1), (2, 4), (3, 1), (4, 2))
        ]
        done = await asyncio.gather(*asked)
        await idle(engine)
    assert [len(one.outputs) for one in done] == [1, 4, 1, 2]
    assert [int(sequence.prompt[0]) for sequence in ends] == [1, 2, 2, 2, 2, 3, 4, 4]


async def test_its_first_tokens_come_while_the_others_wait() -> None:
    async with Engine(SimModel(eos_token_ids=()), max_rows=1, max_waiting=0) as engine:
        stream = engine.stream([1], n=3, max_tokens=30)
        assert (await anext(stream)).index == 0
        assert engine.stats().waiting == 2
        assert [len(output.token_ids) for output in (await stream.completion()).outputs] == [30] * 3
        await idle(engine)


# Pages


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
async def test_they_share_their_prompt_and_with_others_what_the_request_says(configured: bool, asked: bool) -> None:
    fed = 0

    def count(span: Span) -> None:
        nonlocal fed
        fed += span.tokens if span.phase == "launch" else 0

    shared = configured if asked is None else asked
    async with Engine(SimModel(eos_token_ids=()), max_rows=8, prefix_cache=configured) as engine:
        engine.timeline.on_span = count
        first = await engine.generate(list(range(199)), n=8, max_tokens=1, use_prefix_cache=asked)
        assert first.usage.cached_tokens == 0
        assert fed == 199 + 7 * (199 - 192), "twelve pages are computed once"
        await idle(engine)
        assert bool(engine.stats().pages_cached) == shared
        again = await engine.generate(list(range(199)), max_tokens=1, use_prefix_cache=asked)
        assert again.usage.cached_tokens == (192 if shared else 0)


async def test_who_shares_with_nobody_keeps_no_pages() -> None:
    async with Engine(SimModel(eos_token_ids=()), prefix_cache=False) as engine:
        stream = engine.stream(list(range(199)), max_tokens=50)
        await anext(stream)
        assert engine._scheduler is not None
        assert len(engine._scheduler.cache) == 0
        await stream.aclose()


# Ends


def script(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
    return 1 + scripted_token(history, seed, vocab_size - 1)


class Consumer:
    """Asks for four outputs and gives them up in one of several ways."""

    def __init__(self, engine: Engine, way: str) -> None:
        self.way = way
        self.pieces: list[Piece] = []
        self.held = [engine.stream([2, 7], n=4, max_tokens=6, temperature=1.0, seed=1)]
        self.task = asyncio.create_task(self.consume())

    async def consume(self) -> None:
        if self.way == "cancelled completion":
            await self.held[0].completion()
        elif self.way == "dropped":
            await self.held[0].__aenter__()
        else:
            async for piece in self.held[0]:
                self.pieces.append(piece)

    def give_up(self) -> None:
        if self.way == "closed":
            with pytest.raises(StopIteration):
                self.held[0].aclose().send(None)
        elif self.way == "dropped":
            self.held.clear()
        else:
            self.task.cancel()


async def give_up_at(calls: int, way: str, depth: Literal[1, 2], settings: dict[str, int]) -> None:
    probe = Probe()
    model = SimModel(script=script, probe=probe, turns=(3,))
    async with Engine(model, pipeline_depth=depth, **settings) as engine:
        stays = asyncio.create_task(engine.generate([1, 7], max_tokens=30))
        await until(lambda: engine.stats().tokens >= 2)
        consumer = Consumer(engine, way)
        probe.after(calls, consumer.give_up)
        beside = await stays
        await asyncio.gather(consumer.task, return_exceptions=True)
        await idle(engine)
        assert beside.outputs == (await engine.generate([1, 7], max_tokens=30)).outputs
    for index in range(4):
        own = [piece for piece in consumer.pieces if piece.index == index]
        assert all(piece.finish_reason is None for piece in own[:-1]), "nothing after the end"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("settings", [{"max_rows": 5}, {"max_rows": 3}, {"max_rows": 2, "max_waiting": 1}], ids=str)
@pytest.mark.parametrize("way", ["cancelled", "cancelled completion", "closed", "dropped"])
async def test_given_up_at_every_call_of_the_device(
    way: str, settings: dict[str, int], depth: Literal[1, 2], ends: dict[Sequence, int]
) -> None:
    """Some run, some wait in the queue, some at the door: all end, once, and the request beside does not notice."""
    for calls in range(1, 17):
        ends.clear()
        await give_up_at(calls, way, depth, settings)
        assert set(ends.values()) == {1} and len(ends) in (2, 6), "all or none of them became sequences"


class Wandering:
    """Behind any token come those below 10, alike; behind token 3 the logits are no numbers."""

    def forward(self, step: StepInput, kv: KVCache) -> Tensor:
        last = step.tokens[step.lengths.cumsum(0) - 1]
        logits = torch.full((len(last), VOCAB), -50.0)
        logits[:, :10] = 0.0
        logits[last == 3] = float("nan")
        return logits


@pytest.mark.parametrize("rows", [2, 8])
async def test_one_that_fails_ends_all(rows: int, monkeypatch: pytest.MonkeyPatch, ends: dict[Sequence, int]) -> None:
    async with machine(monkeypatch, Wandering(), max_rows=rows) as engine:
        stream = engine.stream([1], n=4, max_tokens=90, temperature=1.0, seed=2)
        pieces = []
        with pytest.raises(ModelError, match="not finite"):  # noqa: PT012
            async for piece in stream:
                pieces.append(piece)  # noqa: PERF401
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(ModelError, match="not finite"):
            await stream.completion()
        await idle(engine)
        assert any(piece.token_ids[-1] == 3 for piece in pieces), "what came before is given"
        assert set(ends.values()) == {1} and len(ends) == 4
        done = await engine.generate([1], n=4, max_tokens=5, allowed_token_ids=[1, 2, 9], temperature=1.0, seed=2)
        assert {token for output in done.outputs for token in output.token_ids} <= {1, 2, 9}, "it lives"


@pytest.mark.parametrize("settings", [{"max_rows": 8}, {"max_rows": 1, "max_waiting": 0}], ids=str)
async def test_the_engine_is_closed(settings: dict[str, int], ends: dict[Sequence, int]) -> None:
    engine = await Engine(SimModel(eos_token_ids=()), **settings).start()
    stream = engine.stream([1], n=3, max_tokens=1000)
    await anext(stream)
    await engine.aclose()
    with pytest.raises(EngineClosed):
        async for _ in stream:
            pass
    with pytest.raises(EngineClosed):
        await stream.completion()
    assert set(ends.values()) == {1} and len(ends) == 3


async def test_the_engine_is_closed_with_one_at_the_door() -> None:
    """None of its outputs has been let in. What the loop is told of is an error, too: nobody else would see it."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    engine = await Engine(SimModel(eos_token_ids=()), max_rows=1, max_waiting=0).start()
    running = engine.stream([1], max_tokens=3000)
    await anext(running)
    waiting = asyncio.create_task(engine.generate([1], n=3, max_tokens=5))
    await until(lambda: engine.stats().waiting == 3)
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await waiting
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not told


async def test_aborted_outputs_keep_what_had_come(tiny: Engine) -> None:
    async with tiny.stream([1, 2], n=3, max_tokens=300, **SAMPLED) as stream:
        first = await anext(stream)
    done = await stream.completion()
    assert {output.finish_reason for output in done.outputs} == {"abort"}
    assert done.outputs[first.index].token_ids[: len(first.token_ids)] == first.token_ids
    await idle(tiny)
