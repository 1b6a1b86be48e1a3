"""Outputs of a grammar, and tokens that are asked for or forbidden, through the engine."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
import torch
from engine.machines import Counting, machine
from engine.waiting import idle, until
from torch import Tensor

from aphoton import (
    Completion,
    ConstraintFailed,
    Engine,
    InvalidRequest,
    SamplingParams,
    SimModel,
    constraints,
)

PROMPT = [10, 20, 30]


class Place(msgspec.Struct):
    row: int
    seat: Literal["a", "b"]


@dataclasses.dataclass
class Booking:
    open: bool
    place: Place


SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "seat": {"enum": ["a", "b", None]}},
    "required": ["open", "seat"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 120}


def even(output: Sequence[int], logits: Tensor) -> None:
    """A processor: even ids and odd ones take turns."""
    logits[len(output) % 2 :: 2] = -torch.inf


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 16},
    "sampled": {"max_tokens": 16, "temperature": 1.0, "seed": 1},
    "schema": {**SAMPLED, "json_schema": SCHEMA, "seed": 2},
    "type": {**SAMPLED, "json_schema": Booking, "seed": 3},
    "object": {**SAMPLED, "json_object": True, "seed": 4, "max_tokens": 20},
    "regex": {**SAMPLED, "regex": "[a-f]{2,5}(-[0-9]){3}", "seed": 5, "logprobs": 2},
    "choices": {**SAMPLED, "choices": ["yes", "no", "maybe not"], "seed": 6},
    "grammar": {**SAMPLED, "grammar": 'start: "x" ("," "y"+)~2', "seed": 7, "max_tokens": 12},
    "patient": {**SAMPLED, "regex": "[ab]*", "seed": 8, "min_tokens": 9, "max_tokens": 30},
    "presence": {"presence_penalty": 2.0, "max_tokens": 16},
    "frequency": {"frequency_penalty": 1.5, "max_tokens": 16, "temperature": 0.5, "seed": 9},
    "repetition": {"repetition_penalty": 3.0, "max_tokens": 16},
    "bias": {"logit_bias": {7: 4.0, 9: 4.5, 11: -100}, "max_tokens": 16, "temperature": 1.0, "seed": 10},
    "allowed": {"allowed_token_ids": [3, 5, 8, 13], "max_tokens": 16, "temperature": 1.0, "seed": 11},
    "bad words": {"bad_words": ["a", "bc", "cab"], "allowed_token_ids": list(b"abc d"), **SAMPLED, "seed": 12},
    "processor": {"processor": even, "max_tokens": 16, "temperature": 1.0, "seed": 13},
    "all": {
        **SAMPLED,
        "regex": "[a-z]{20}",
        "seed": 14,
        "n": 2,
        "bad_words": ["x", "ab"],
        "allowed_token_ids": list(range(97, 123)),
        "presence_penalty": 1.0,
        "repetition_penalty": 1.2,
        "logit_bias": {100: 2},
        "processor": even,
        "logprobs": 1,
        "echo": True,
        "prompt_logprobs": 0,
    },
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Completion]:
    """Each by itself, one after the other."""

    async def run() -> dict[str, Completion]:
        async with Engine("random:tiny", dtype="float32", pipeline_depth=1, max_rows=1, prefix_cache=False) as engine:
            return {name: await engine.generate(PROMPT, **sampling) for name, sampling in FEATURES.items()}

    return asyncio.run(run())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("rows", "settings"), [(3, {"max_step_tokens": 5}), (32, {}), (8, {"kv_pages": 20})])
async def test_equal_tokens_alone_and_in_a_crowd(
    alone: dict[str, Completion], rows: int, settings: dict[str, Any], depth: Literal[1, 2]
) -> None:
    """In steps of any size, with and without the cache, preempted where pages run out, and beside those given up."""
    config: dict[str, Any] = {"dtype": "float32", "pipeline_depth": depth, "max_rows": rows, **settings}
    async with Engine("random:tiny", **config) as engine:
        leaving = [
            asyncio.create_task(engine.generate(PROMPT, **{**sampling, "max_tokens": 60}))
            for sampling in FEATURES.values()
        ]
        asked = [asyncio.create_task(engine.generate(PROMPT, **sampling)) for sampling in FEATURES.values()]
        for number, task in enumerate(leaving):
            await until(lambda number=number: engine.stats().steps >= number or all(one.done() for one in asked))
            task.cancel()
        done = await asyncio.gather(*asked)
        await asyncio.gather(*leaving, return_exceptions=True)
        await idle(engine)
    for name, one in zip(FEATURES, done, strict=True):
        expected = alone[name]
        for output, other in zip(one.outputs, expected.outputs, strict=True):
            assert output.token_ids == other.token_ids, name
            assert (output.text, output.finish_reason) == (other.text, other.finish_reason), name
            assert output.parsed == other.parsed, name


def test_what_each_asked_for(alone: dict[str, Completion]) -> None:
    plain = alone["plain"].token_ids
    for name in ("presence", "repetition"):
        assert alone[name].token_ids != plain, name
    booking = alone["type"].parsed
    if alone["type"].finish_reason == "stop":
        assert isinstance(booking, Booking) and isinstance(booking.place, Place)
    assert alone["schema"].parsed == json.loads(alone["schema"].text)
    assert set(alone["schema"].parsed) == {"open", "seat"}
    assert re.fullmatch("[a-f]{2,5}(-[0-9]){3}", alone["regex"].text)
    assert alone["regex"].parsed == alone["regex"].text
    assert alone["choices"].text in ("yes", "no", "maybe not")
    assert re.match("x,y+", alone["grammar"].text)
    assert re.fullmatch("[ab]{9,}", alone["patient"].text)
    assert len(set(alone["repetition"].token_ids)) >= len(set(plain))
    assert 11 not in alone["bias"].token_ids and {7, 9} & {*alone["bias"].token_ids}
    assert {*alone["allowed"].token_ids} <= {3, 5, 8, 13}
    text = alone["bad words"].text
    assert {*text} <= {*"bc d"} and "bc" not in text and len(text) > 50
    assert all(token % 2 != count % 2 for count, token in enumerate(alone["processor"].token_ids))
    for output in alone["all"].outputs:
        text = output.text.removeprefix(bytes(PROMPT).decode())
        assert re.fullmatch("[a-z]{20}", text) and "x" not in text and "ab" not in text
        assert all((ord(char) - count) % 2 for count, char in enumerate(text))
        assert output.parsed == text, "the prompt is not parsed"


# Grammars


async def test_chat_takes_what_generate_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(monkeypatch, Counting(), template="{{ messages[0].content }}") as engine:
        done = await engine.chat([{"role": "user", "content": "hi"}], json_schema=SCHEMA)
        assert done.parsed == json.loads(done.text) and done.finish_reason == "stop"


@pytest.mark.parametrize("depth", [1, 2])
async def test_on_the_simulated_device(depth: Literal[1, 2]) -> None:
    async with Engine(SimModel(vocab_size=300, eos_token_ids=(256,)), pipeline_depth=depth) as engine:
        done = await asyncio.gather(
            *(engine.generate([number], regex="[0-9]{4}", temperature=1.0, seed=number) for number in range(20))
        )
        assert all(re.fullmatch("[0-9]{4}", one.text) and one.finish_reason == "stop" for one in done)
        await idle(engine)


@pytest.mark.parametrize(
    ("sampling", "reason", "parsed"),
    [
        ({"max_tokens": 3}, "length", None),
        ({"max_tokens": 0}, "length", None),
        ({"stop": "-"}, "stop", None),
        ({}, "stop", "aaaa-bbbb"),
        ({"stop_token_ids": [ord("-")]}, "stop", None),
        ({"ignore_eos": True}, "stop", "aaaa-bbbb"),
        ({"echo": True}, "stop", "aaaa-bbbb"),
    ],
    ids=str,
)
async def test_what_is_parsed(tiny: Engine, sampling: dict[str, Any], reason: str, parsed: str | None) -> None:
    done = await tiny.generate("Hi", regex="aaaa-bbbb", **sampling)
    assert (done.finish_reason, done.parsed) == (reason, parsed)
    assert (await tiny.generate("Hi", max_tokens=2)).parsed is None
    assert msgspec.structs.replace(done) == done


@pytest.mark.parametrize(("stop", "parsed"), [([ord("2")], None), ([ord("3")], None), ([256], 123), ([], 123)], ids=str)
async def test_a_stop_token_of_the_requests_own_cuts(stop: list[int], parsed: int | None) -> None:
    """Whatever is left: the last token is not part of the text. The model's own end token ends it, named or not."""

    def script(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
        return {1: ord("1"), ord("1"): ord("2"), ord("2"): ord("3")}.get(history[-1], 256)

    async with Engine(SimModel(vocab_size=300, eos_token_ids=(256,), script=script)) as engine:
        done = await engine.generate([1], json_schema={"type": "integer"}, stop_token_ids=stop)
        assert done.finish_reason == "stop" and done.parsed == parsed


async def test_what_a_type_refuses_is_an_error_of_whoever_looks(tiny: Engine) -> None:
    class Never(msgspec.Struct):
        value: Literal["a"]

        def __post_init__(self) -> None:
            raise ValueError("never")

    done = await tiny.generate("Hi", json_schema=Never)
    assert done.text.replace(" ", "") == '{"value":"a"}'
    with pytest.raises(ValueError, match="never"):
        _ = done.parsed
    assert (await tiny.generate("Hi", max_tokens=2)).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("json_schema", {"type": "no such type"}),
        ("json_schema", {"type": "string", "format": "no-such-format"}),
        ("json_schema", {"not": {}, "unevaluatedItems": False, "contains": {}}),
        ("json_schema", {"$ref": "https://example.com/schema"}),
        ("json_schema", object),
        ("json_schema", list["Nobody"]),  # type: ignore[name-defined]  # noqa: F821
        ("regex", "("),
        ("regex", "(?=a)b"),
        ("grammar", "nonsense"),
        ("grammar", 'begin: "a"'),
        ("choices", ["a", "a"]),
    ],
    ids=str,
)
async def test_what_cannot_be_compiled_is_refused_in_the_callers_task(tiny: Engine, field: str, value: Any) -> None:
    for n in (1, 2):
        with pytest.raises(InvalidRequest) as refused:
            await tiny.generate("Hi", n=n, **{field: value})
        assert refused.value.field == field
    await idle(tiny)
    assert tiny.stats().steps == 0


# Ids


@pytest.mark.parametrize(
    "sampling",
    [
        {"logit_bias": {512: 1.0}},
        {"allowed_token_ids": [1, 512]},
        {"stop_token_ids": [512]},
        {"allowed_token_ids": [10**30]},
        {"allowed_token_ids": [10**5000]},
        {"allowed_token_ids": [1, 10**5000], "regex": "a+"},
        {"stop_token_ids": [10**5000]},
        {"logit_bias": {10**5000: 1.0}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_ids_are_the_models(tiny: Engine, sampling: dict[str, Any]) -> None:
    for n in (1, 3):
        with pytest.raises(InvalidRequest, match="vocabulary size 512") as refused:
            await tiny.generate([1], n=n, **sampling)
        assert refused.value.field == next(iter(sampling))
    await idle(tiny)
    assert tiny.stats().steps == 0


async def test_end_tokens_alone_cannot_wait(tiny: Engine) -> None:
    with pytest.raises(InvalidRequest, match="end tokens only") as refused:
        await tiny.generate([1], allowed_token_ids=[7], stop_token_ids=[7, 8], min_tokens=1)
    assert refused.value.field == "allowed_token_ids"
    assert (await tiny.generate([1], allowed_token_ids=[7], stop_token_ids=[7])).token_ids == (7,)
    with pytest.raises(InvalidRequest, match="end tokens only") as refused:
        await tiny.generate([1], allowed_token_ids=[97, 7], bad_words=["a"], stop_token_ids=[7], min_tokens=1)
    assert refused.value.field == "allowed_token_ids"


async def test_bad_words_that_leave_nothing(tiny: Engine) -> None:
    with pytest.raises(InvalidRequest, match="leave no token") as refused:
        await tiny.generate([1], allowed_token_ids=list(b"ab"), bad_words=["a", "b"])
    assert refused.value.field == "bad_words"
    with pytest.raises(ConstraintFailed, match="no token is left"):
        await tiny.generate([1], allowed_token_ids=list(b"ab"), bad_words=["a", "bb"])
    with pytest.raises(ConstraintFailed, match="no token is left"):
        await tiny.generate([1], regex="ab", bad_words=["ab"], n=2)
    await idle(tiny)


async def test_bad_words_on_the_simulated_device() -> None:
    async with Engine(SimModel(vocab_size=256)) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.generate([1], bad_words=["a"], logit_bias={1: 1.0})
        assert refused.value.field == "logit_bias", "which means nothing here"
        sampling: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0, "seed": 1, "ignore_eos": True}
        assert set(b"abcde") & {*(await engine.generate([1], **sampling)).token_ids}
        assert not set(b"abcde") & {*(await engine.generate([1], bad_words=list("abcde"), **sampling)).token_ids}


async def test_a_word_is_forbidden_with_a_space_before_it_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counting model would say ``abc...``, and the space before ``!``."""
    async with machine(monkeypatch, Counting()) as engine:
        assert (await engine.generate(b"a".decode(), max_tokens=3)).text == "bcd"
        for words in (["bcd"], [" bcd"], ["cd", "zz"]):
            done = await engine.generate("a", max_tokens=3, bad_words=words)
            assert done.text[:2] == "bc" and done.text[2] != "d"
        done = await engine.generate("a", max_tokens=3, bad_words=["c"])
        assert done.text[0] == "b" and done.text[1] != "c"


async def test_a_bias_and_a_ban_of_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(monkeypatch, Counting()) as engine:
        done = await engine.generate("a", max_tokens=2, logit_bias={98: 100, 120: 50}, bad_words=["b"])
        assert done.text == "xx"


async def test_what_sequences_share_is_made_once(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("AllowedTokens", "BadWords"):
        kind = getattr(constraints, name)

        def make(*args: Any, kind: Any = kind, name: str = name) -> Any:
            made.append(name)
            return kind(*args)

        monkeypatch.setattr(constraints, name, make)
    done = await tiny.generate(
        [1], n=8, regex="[a-f]+", max_tokens=4, allowed_token_ids=[*b"abcdef"], bad_words=["ab"], temperature=1.0
    )
    assert len(done.outputs) == 8 and sorted(made) == ["AllowedTokens", "BadWords"]


# Processors


async def test_a_request_that_leaves_no_token_spoils_nobodys_pages() -> None:
    """It is told that this is its own doing, and what it shares with others is sound."""
    prompt = [*range(100)]

    def nothing(output: Sequence[int], logits: Tensor) -> None:
        logits.fill_(-torch.inf)

    async with Engine("random:tiny", dtype="float32") as engine:
        await engine.generate(prompt, max_tokens=1)
        cached = (await engine.generate(prompt, max_tokens=1)).usage.cached_tokens
        assert cached > 90
        asked: list[tuple[str, dict[str, Any]]] = [
            ("processor", {"processor": nothing}),
            (
                "min_tokens",
                {"bad_words": ["bb"], "allowed_token_ids": [97, 98], "stop_token_ids": [97], "min_tokens": 9},
            ),
        ]
        for field, sampling in asked:
            with pytest.raises(ConstraintFailed, match="no token is left") as failed:
                await engine.generate(prompt, **sampling)
            assert failed.value.field == field
            assert (await engine.generate(prompt, max_tokens=1)).usage.cached_tokens == cached
        await idle(engine)


async def test_a_processor_cannot_bring_a_bad_word_back(tiny: Engine) -> None:
    def level(output: Sequence[int], logits: Tensor) -> None:
        logits.fill_(0.0)
        logits[97] = 50.0

    assert (await tiny.generate([1], processor=level, max_tokens=3)).token_ids == (97,) * 3
    done = await tiny.generate([1], processor=level, bad_words=["a"], max_tokens=3)
    assert 97 not in done.token_ids


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit, StopIteration, StopAsyncIteration],
)
async def test_a_processor_that_raises_what_is_not_its_own_to_raise(tiny: Engine, error: Any) -> None:
    def fails(output: Sequence[int], logits: Tensor) -> None:
        raise error

    with pytest.raises(RuntimeError, match=f"the processor raised {error.__name__}") as raised:
        await tiny.generate([1], processor=fails, max_tokens=3)
    assert isinstance(raised.value.__cause__, error)
    with pytest.raises(RuntimeError, match="the processor raised"):
        async for _ in tiny.stream([1], processor=fails, max_tokens=3):
            pass
    assert len((await tiny.generate([1], max_tokens=3, ignore_eos=True)).token_ids) == 3
    await idle(tiny)


async def test_a_processor_that_fails_ends_its_request_alone(tiny: Engine) -> None:
    def fails(output: Sequence[int], logits: Tensor) -> None:
        if len(output) == 3:
            raise KeyError("the app's own")

    stays = asyncio.create_task(tiny.generate([1], max_tokens=20))
    for n in (1, 2):
        stream = tiny.stream([1], processor=fails, max_tokens=9, n=n)
        tokens: list[int] = []
        with pytest.raises(KeyError, match="the app's own"):  # noqa: PT012
            async for piece in stream:
                tokens += piece.token_ids
        assert len(tokens) == 3 * n
    assert len((await stays).token_ids) == 20
    await idle(tiny)


@pytest.mark.parametrize("make", [torch.zeros_like, lambda logits: logits[:5], lambda logits: 0])
async def test_a_processor_that_returns_what_it_wants_is_told(tiny: Engine, make: Any) -> None:
    kind = type(make(torch.zeros(9))).__name__
    with pytest.raises(InvalidRequest, match=f"^processor: must change the logits in place .* not {kind}"):
        await tiny.generate(PROMPT, max_tokens=3, processor=lambda output, logits: make(logits))
    once = await tiny.generate(PROMPT, max_tokens=3, processor=lambda output, logits: logits.neg_())
    assert once.token_ids != (await tiny.generate(PROMPT, max_tokens=3)).token_ids


async def test_a_processor_sees_the_output(tiny: Engine) -> None:
    seen: list[list[int]] = []

    def watch(output: Sequence[int], logits: Tensor) -> None:
        assert logits.shape == (512,)
        seen.append(list(output))

    done = await tiny.generate([1], SamplingParams(processor=watch, max_tokens=5))
    assert seen == [list(done.token_ids[:count]) for count in range(5)]
    assert done.token_ids == (await tiny.generate([1], max_tokens=5)).token_ids
