"""The engine on a GPU: the same tokens with and without graphs and pipeline, cancellations, faults, and no waiting."""

import asyncio
import importlib.util
import random
import re
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from engine.waiting import idle

from aphoton import Completion, Engine, EngineClosed, EngineDead, InvalidRequest, ModelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
]

MODEL = "random:135m"
LARGER = "random:1b"
SETTINGS: dict[str, Any] = {"device": "cuda", "max_rows": 32, "kv_pages": 2000, "max_model_len": 1024}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(40000) for _ in range(source.choice([1, 2, 15, 16, 17, 100, 300]))] for _ in range(count)]


async def run(
    count: int,
    *,
    model: str = MODEL,
    tokens: int = 40,
    sampling: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Completion]:
    async with Engine(model, **{**SETTINGS, **settings}) as engine:
        return await asyncio.gather(
            *(
                engine.generate(prompt, max_tokens=tokens + index % 7, ignore_eos=True, **(sampling or {}))
                for index, prompt in enumerate(prompts(count))
            )
        )


def ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture
def one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches whatever the pipeline: cuBLAS chooses its kernels, and so its rounding, by size.

    Every decode step is one of all rows, and the whole crowd is there before the first step.
    """
    from aphoton import engine
    from aphoton.device.cuda import device

    monkeypatch.setattr(device, "buckets", lambda max_rows: [max_rows])
    monkeypatch.setattr(engine, "SUBMISSIONS", 1000)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 7}])
@pytest.mark.usefixtures("one_size")
async def test_depth_changes_no_token(sampling: dict[str, Any]) -> None:
    one = await run(32, model=LARGER, sampling=sampling, pipeline_depth=1)
    assert ids(one) == ids(await run(32, model=LARGER, sampling=sampling))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.usefixtures("one_size")
async def test_two_gpus_in_one_program() -> None:
    one = run(16, device="cuda:0")
    other = run(16, device="cuda:1", sampling={"logprobs": 2})
    first, second = await asyncio.gather(one, other)
    assert ids(first) == ids(second)
    assert torch.cuda.current_device() == 0


@pytest.mark.usefixtures("one_size")
async def test_graphs_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from aphoton.device.cuda.graphs import DecodeGraphs

    with_graphs = ids(await run(32, model=LARGER))
    captured: dict[int, Any] = {}

    def init(self: DecodeGraphs, sizes: list[int], capture: Any, *_: Any) -> None:
        self.sizes = sizes
        captured[id(self)] = capture

    monkeypatch.setattr(DecodeGraphs, "__init__", init)
    monkeypatch.setattr(DecodeGraphs, "replay", lambda self, slot, size: captured[id(self)](slot, size))
    assert ids(await run(32, model=LARGER)) == with_graphs


@pytest.mark.usefixtures("one_size")
async def test_cancellations_change_no_survivor() -> None:
    expected = ids(await run(32, model=LARGER))
    source = random.Random(1)
    async with Engine(LARGER, **SETTINGS) as engine:
        streams = [
            engine.stream(prompt, max_tokens=40 + index % 7, ignore_eos=True)
            for index, prompt in enumerate(prompts(32))
        ]
        victims = {index: source.randrange(1, 30) for index in source.sample(range(32), 16)}

        async def consume(index: int) -> tuple[int, ...]:
            seen = 0
            async for piece in streams[index]:
                seen += len(piece.token_ids)
                if index in victims and seen >= victims[index]:
                    await streams[index].aclose()
                    return ()
            return (await streams[index].completion()).token_ids

        results = await asyncio.gather(*map(consume, range(32)))
        assert [r for i, r in enumerate(results) if i not in victims] == [
            r for i, r in enumerate(expected) if i not in victims
        ]
        await idle(engine)


async def test_close_to_the_reference() -> None:
    """Log-probabilities of the same tokens by the plain torch path."""
    for fused, plain in zip(
        await run(8, sampling={"logprobs": 2}), await run(8, sampling={"logprobs": 2}, kernels="torch"), strict=True
    ):
        assert fused.logprobs is not None and plain.logprobs is not None
        for ours, theirs in zip(fused.logprobs, plain.logprobs, strict=True):
            assert abs(ours.top[0][1] - theirs.top[0][1]) < 0.2
            if ours.token_id != theirs.token_id:
                break


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Whatever waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


async def test_nothing_waits_for_the_device() -> None:
    """Launching, awaiting and committing under torch's own watch."""
    async with Engine(MODEL, **SETTINGS) as engine:
        with waiting_is_an_error():
            await asyncio.gather(
                engine.generate([1, 2, 3] * 40, max_tokens=30),
                engine.generate([5], max_tokens=9, temperature=1.0, top_p=0.5, seed=3),
                engine.generate([9, 8], max_tokens=5, logprobs=5, min_tokens=3),
            )


async def test_a_fault_kills_the_engine_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from aphoton.device.cuda.graphs import DecodeGraphs

    calls: Iterator[int] = iter(range(1000))
    replay = DecodeGraphs.replay

    def fail(self: DecodeGraphs, slot: int, size: int) -> None:
        if next(calls) == 5:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        replay(self, slot, size)

    monkeypatch.setattr(DecodeGraphs, "replay", fail)
    async with Engine(MODEL, **SETTINGS) as engine:
        waiting = [asyncio.create_task(engine.generate(p, max_tokens=50)) for p in prompts(40)]
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, EngineDead) for error in done)
        with pytest.raises(EngineDead, match="illegal memory access"):
            await engine.generate([1])
    monkeypatch.undo()
    assert len(await run(2)) == 2  # another one runs


async def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(InvalidRequest, match=r"tried to allocate [\d.]+ .*MiB are free.*kv_memory"):
        await Engine(MODEL, device="cuda", kv_pages=40_000_000).start()
    assert len(await run(2)) == 2


async def test_memory_does_not_grow() -> None:
    async with Engine(MODEL, **SETTINGS) as engine:
        for _ in range(2):
            await asyncio.gather(*(engine.generate(p, max_tokens=20) for p in prompts(64)))
            before = torch.cuda.memory_reserved()
        for seed in range(6):
            await asyncio.gather(*(engine.generate(p, max_tokens=20) for p in prompts(64, seed)))
        assert torch.cuda.memory_reserved() == before
    # cuBLAS keeps 64 MiB for the stream, which the next engine uses again.
    assert torch.cuda.memory_allocated() < 80 << 20


async def test_logits_that_are_not_finite_end_their_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from aphoton.models.fused import FusedDecoder

    mixed = FusedDecoder.mixed

    def broken(self: FusedDecoder, *args: Any, **kwargs: Any) -> Generator[None, None, torch.Tensor]:
        logits = yield from mixed(self, *args, **kwargs)
        logits[0, 5] = torch.nan
        return logits

    monkeypatch.setattr(FusedDecoder, "mixed", broken)
    async with Engine(MODEL, **SETTINGS) as engine:
        ended = await asyncio.gather(
            *(engine.generate([number, 1], max_tokens=5, ignore_eos=True) for number in range(3)),
            return_exceptions=True,
        )
        assert [type(one) for one in ended] == [ModelError, Completion, Completion]
        await idle(engine)


async def test_starting_leaves_the_page_tables_alone() -> None:
    """More rows than a sequence has tokens: captures must not take what a warm-up left for page tables."""
    async with Engine(MODEL, device="cuda", max_rows=64, max_model_len=256) as engine:
        assert engine._loaded is not None
        device: Any = engine._loaded.device
        assert not device._rows.tables.any()
        assert len((await engine.generate([1, 2], max_tokens=250, ignore_eos=True)).token_ids) == 250


async def test_long_prompts_and_logprobs_take_no_memory_from_the_driver() -> None:
    async with Engine(MODEL, **{**SETTINGS, "max_model_len": 8000, "max_step_tokens": 1024}) as engine:
        before = torch.cuda.memory_reserved()
        assert len((await engine.generate([7] * 7000, max_tokens=3)).token_ids) == 3
        await asyncio.gather(*(engine.generate([number], max_tokens=3, logprobs=64) for number in range(32)))
        assert torch.cuda.memory_reserved() == before


async def test_two_engines_at_once() -> None:
    settings = {**SETTINGS, "max_rows": 4, "kv_pages": 200}
    one, other = Engine(MODEL, **settings), Engine(MODEL, **settings)
    await asyncio.gather(one.start(), other.start())
    first, second = await asyncio.gather(
        *(engine.generate([1, 2, 3], max_tokens=20, ignore_eos=True) for engine in (one, other))
    )
    assert first.token_ids == second.token_ids
    await one.aclose()
    assert len((await other.generate([4], max_tokens=5, ignore_eos=True)).token_ids) == 5
    await other.aclose()


async def test_closed_in_the_middle() -> None:
    engine = await Engine(MODEL, **SETTINGS).start()
    waiting = [asyncio.create_task(engine.generate(prompt, max_tokens=500)) for prompt in prompts(40)]
    stream = engine.stream([1, 2], max_tokens=500)
    await anext(stream)
    await engine.aclose()
    assert all(isinstance(one, EngineClosed) for one in await asyncio.gather(*waiting, return_exceptions=True))


@pytest.mark.parametrize(
    "settings", [{"page_size": 32}, {"dtype": "float16"}, {"max_rows": 1}, {"kernels": "fused"}, {"dtype": "float32"}]
)
async def test_other_settings(settings: dict[str, Any]) -> None:
    assert [len(one.token_ids) for one in await run(3, **settings)] == [40, 41, 42]


def prefer_later(output: Sequence[int], logits: torch.Tensor) -> None:
    """A processor: tokens that depend on how many there are, and nothing that is read back."""
    logits[: 100 + len(output)] -= 5.0


RULES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 5, "logit_bias": {7: 6.0, 4000: 5.0, 48000: -100.0}},
    {"allowed_token_ids": list(range(100, 164)), "frequency_penalty": 2.0},
    {"regex": "[a-z]{60}", "temperature": 1.0, "seed": 6},
    {"processor": prefer_later, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 7, "min_tokens": 9},
    {"regex": "([0-9]{3} ){40}", "repetition_penalty": 1.1, "logprobs": 0},
]
"""One for each request in turn: what is late, what is not, and what has no rules, in one batch."""


async def run_rules(count: int = 32, **settings: Any) -> list[Completion]:
    async with Engine(LARGER, **{**SETTINGS, **settings}) as engine:
        # Grammars are compiled before, so that all are there before the first step.
        await asyncio.gather(*(engine.generate([7], max_tokens=9, **rule) for rule in RULES))
        done = await asyncio.gather(
            *(
                engine.generate(prompt, max_tokens=40 + index % 7, ignore_eos=True, **RULES[index % len(RULES)])
                for index, prompt in enumerate(prompts(count))
            )
        )
        await idle(engine)
        return done


@pytest.mark.usefixtures("one_size")
async def test_depth_changes_no_token_of_any_rule() -> None:
    one, two = await run_rules(pipeline_depth=1), await run_rules()
    assert ids(one) == ids(two)
    # And rows without rules have what they have among their like.
    plain = ids(await run(32, model=LARGER))
    assert [tokens for index, tokens in enumerate(ids(two)) if index % len(RULES) == 0] == plain[:: len(RULES)]
    for index, done in enumerate(two):
        rule = RULES[index % len(RULES)]
        if "allowed_token_ids" in rule:
            assert set(done.token_ids) <= set(rule["allowed_token_ids"])
        if rule.get("regex") == "[a-z]{60}":
            assert re.fullmatch("[a-z]+", done.text)
        if "logprobs" in rule:
            assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)


async def test_penalties_are_those_of_the_reference() -> None:
    """The plain torch path has the same sampler: its logits differ by rounding, so the tokens agree for a while."""
    rule = RULES[1]
    fused = ids(await run(16, sampling=rule))
    plain = ids(await run(16, sampling=rule, kernels="torch"))
    # Random weights have near ties, which rounding decides: not all of the first tokens are equal without rules either.
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(fused, plain, strict=True)) >= 12
    assert all(len(set(tokens)) > 1 for tokens in fused)


async def test_penalties_and_bias_do_what_they_say() -> None:
    async with Engine(MODEL, **SETTINGS) as engine:
        forced, once, never = await asyncio.gather(
            engine.generate([1, 2], max_tokens=20, ignore_eos=True, logit_bias={77: 100.0}),
            engine.generate(
                [1, 2],
                max_tokens=8,
                ignore_eos=True,
                allowed_token_ids=list(range(40, 48)),
                presence_penalty=2.0,
                logit_bias={token: 0.001 * token for token in range(40, 48)},
                frequency_penalty=2.0,
            ),
            engine.generate([1, 2], max_tokens=20, ignore_eos=True, logit_bias={5: 100.0, 6: 100.0}, min_tokens=20),
        )
    assert set(forced.token_ids) == {77}
    assert len(set(once.token_ids)) > 1 and set(once.token_ids) <= set(range(40, 48))
    assert set(never.token_ids) <= {5, 6}


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_prompt_logprobs_do_not_depend_on_the_chunks(kernels: str) -> None:
    prompt = [(7 * i) % 40000 for i in range(300)]
    found = []
    for step in (64, 1024):
        async with Engine(MODEL, **{**SETTINGS, "max_step_tokens": step, "kernels": kernels}) as engine:
            done = await engine.generate(prompt, max_tokens=2, prompt_logprobs=2)
            assert done.prompt_logprobs is not None and len(done.prompt_logprobs) == len(prompt)
            assert done.prompt_logprobs[0] is None
            found.append([one for one in done.prompt_logprobs if one is not None])
    for one, other in zip(*found, strict=True):
        assert one.token_id == other.token_id
        assert abs(one.logprob - other.logprob) < 0.1 and abs(one.top[0][1] - other.top[0][1]) < 0.1


async def test_no_rule_waits_for_the_device() -> None:
    async with Engine(MODEL, **SETTINGS) as engine:
        # Once before: a grammar is compiled, pinned memory is taken.
        for watch in (nullcontext, waiting_is_an_error):
            with watch():
                await asyncio.gather(
                    *(engine.generate([1, 2, 3] * 20, max_tokens=20, ignore_eos=True, **rule) for rule in RULES),
                    engine.generate([4, 5, 6] * 30, max_tokens=2, prompt_logprobs=3),
                )


async def test_rules_take_no_memory_from_the_driver() -> None:
    async with Engine(MODEL, **SETTINGS) as engine:
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            await asyncio.gather(
                *(
                    engine.generate([number], max_tokens=10, ignore_eos=True, **RULES[number % len(RULES)])
                    for number in range(64)
                ),
                engine.generate([9] * 700, max_tokens=2, prompt_logprobs=64),
            )
        assert torch.cuda.memory_reserved() == before


async def test_a_processor_that_fails_ends_its_request_only() -> None:
    def fail(output: Sequence[int], logits: torch.Tensor) -> None:
        if len(output) == 3:
            raise LookupError("no such state")

    async with Engine(MODEL, **SETTINGS) as engine:
        ended = await asyncio.gather(
            engine.generate([1], max_tokens=9, ignore_eos=True, processor=fail),
            engine.generate([1], max_tokens=9, ignore_eos=True),
            return_exceptions=True,
        )
        assert isinstance(ended[0], Exception) and isinstance(ended[1], Completion)
        await idle(engine)
