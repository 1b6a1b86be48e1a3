"""The names, signatures and refusals that an app relies on."""

import asyncio
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from engine.waiting import until

import aphoton
from aphoton import (
    AphotonError,
    Completion,
    CompletionStream,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    ModelError,
    Piece,
    PromptTooLong,
    SamplingParams,
    SimModel,
)

# Names


@pytest.mark.parametrize(
    ("name", "parameters", "awaited"),
    [
        ("start", [], True),
        ("aclose", ["drain"], True),
        ("generate", ["prompt", "params", "sampling"], True),
        ("stream", ["prompt", "params", "sampling"], False),
        ("chat", ["messages", "params", "tools", "sampling"], True),
        ("chat_stream", ["messages", "params", "tools", "sampling"], False),
        ("tokenize", ["text"], True),
        ("detokenize", ["ids"], True),
        ("stats", [], False),
    ],
)
def test_calls(name: str, parameters: list[str], awaited: bool) -> None:
    call = getattr(Engine, name)
    assert list(inspect.signature(call).parameters)[1:] == parameters
    assert inspect.iscoroutinefunction(call) == awaited


def test_settings_and_parameters() -> None:
    settings = (
        "device dtype pipeline_depth max_rows max_waiting overload max_model_len kv_pages kv_memory page_size seed"
    )
    assert set(settings.split()) <= set(EngineConfig.__struct_fields__)
    parameters = (
        "max_tokens min_tokens temperature top_k top_p min_p seed stop stop_token_ids include_stop_str_in_output "
        "ignore_eos logprobs prompt_logprobs echo n presence_penalty frequency_penalty repetition_penalty logit_bias "
        "allowed_token_ids bad_words processor json_schema json_object regex choices grammar priority deadline "
        "use_prefix_cache"
    )
    assert set(parameters.split()) == set(SamplingParams.__struct_fields__)
    assert (EngineConfig().pipeline_depth, EngineConfig().page_size) == (2, 16)


def test_errors() -> None:
    for error in (InvalidRequest, EngineOverloaded, EngineClosed, EngineDead, ModelError):
        assert issubclass(error, AphotonError)
    assert issubclass(PromptTooLong, InvalidRequest)
    assert PromptTooLong("prompt", "too long").field == "prompt"
    for error in (PromptTooLong("prompt", "too long"), InvalidRequest("top_p", "too large")):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), copied.field) == (type(error), str(error), error.field)


def test_public_data_is_frozen_and_by_keyword() -> None:
    public = [getattr(aphoton, name) for name in aphoton.__all__]
    data = [kind for kind in public if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    assert {SamplingParams, EngineConfig, Completion, Piece, aphoton.Stats, aphoton.Usage} < set(data)
    for kind in data:
        assert kind.__struct_config__.frozen
        with pytest.raises(TypeError, match="positional"):
            kind(1)


async def test_what_a_request_gives_back(tiny: Engine) -> None:
    done = await tiny.generate("Hello", max_tokens=5)
    assert isinstance(done, Completion)
    assert (done.text, done.token_ids, done.finish_reason) == (
        done.outputs[0].text,
        done.outputs[0].token_ids,
        done.outputs[0].finish_reason,
    )
    assert len(done.outputs) == 1
    assert done.finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (5, 5, 0)
    times = done.timings
    assert times.ttft is not None and times.itl is not None
    assert 0 <= times.queued <= times.ttft <= times.total
    assert times.itl == pytest.approx((times.total - times.ttft) / 4)
    with pytest.raises(AttributeError):
        done.usage = None  # type: ignore[misc, assignment]


async def test_one_token_has_no_time_between_tokens(tiny: Engine) -> None:
    done = await tiny.generate("Hello", max_tokens=1)
    assert done.timings.itl is None and done.timings.ttft is not None


async def test_a_stream_is_an_iterator_and_no_generator(tiny: Engine) -> None:
    stream = tiny.stream("Hello", max_tokens=6)
    assert isinstance(stream, CompletionStream)
    assert not inspect.isasyncgen(stream)
    assert aiter(stream) is stream
    pieces = [piece async for piece in stream]
    assert all(isinstance(piece, Piece) and piece.index == 0 for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    done = await stream.completion()
    assert "".join(piece.text for piece in pieces) == done.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == done.token_ids
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert done == await stream.completion(), "as often as one asks"


async def test_a_stream_as_a_context_is_submitted_at_its_beginning_and_closed_at_its_end(tiny: Engine) -> None:
    async with tiny.stream("Hello", max_tokens=1000) as stream:
        assert tiny.stats().running + tiny.stats().waiting == 1
        first = await anext(stream)
    assert first.token_ids
    assert tiny.stats().running == 0
    done = await stream.completion()
    assert done.finish_reason == "abort"
    assert done.token_ids[: len(first.token_ids)] == first.token_ids
    assert len(done.token_ids) < 1000


async def test_a_stream_that_was_closed_before_it_began(tiny: Engine) -> None:
    stream = tiny.stream("Hello")
    await stream.aclose()
    assert [piece async for piece in stream] == []
    with pytest.raises(EngineClosed):
        await stream.completion()


async def test_a_stream_that_nobody_reads_is_never_submitted(tiny: Engine) -> None:
    stream = tiny.stream("Hello")
    await asyncio.sleep(0)
    assert tiny.stats().running == tiny.stats().waiting == 0
    del stream
    await asyncio.sleep(0)
    assert tiny.stats().steps == 0


async def test_a_slow_consumer_is_merged_into() -> None:
    async with Engine(SimModel(eos_token_ids=()), max_rows=1) as engine:
        stream = engine.stream([1], max_tokens=50)
        first = await anext(stream)
        await until(lambda: engine.stats().tokens >= 40)
        second = await anext(stream)
        assert len(second.token_ids) >= 40 - len(first.token_ids)
        done = await stream.completion()
    assert done.token_ids[: len(first.token_ids + second.token_ids)] == first.token_ids + second.token_ids


async def test_two_readers_of_one_stream_are_told() -> None:
    """While it is started, in the line of a full queue, and while it is read. The first one reads on."""
    async with Engine(SimModel(eos_token_ids=()), max_rows=1, max_waiting=0) as engine:
        before = asyncio.create_task(engine.generate([1], max_tokens=200))
        stream = engine.stream([1], max_tokens=50)
        one = asyncio.create_task(stream.completion())
        await until(lambda: engine.stats().running and engine.stats().waiting)
        with pytest.raises(AphotonError, match="started by another task"):
            await anext(stream)
        await before
        await until(lambda: engine.stats().running)
        for read in (stream.completion, stream.__anext__):
            with pytest.raises(AphotonError, match="read by another task"):
                await read()
        assert len((await one).token_ids) == 50


# Settings


def test_settings_by_keyword_go_before_those_of_the_struct() -> None:
    engine = Engine("random:tiny", EngineConfig(max_rows=3, page_size=8), max_rows=5)
    assert (engine.config.max_rows, engine.config.page_size) == (5, 8)
    assert Engine("random:tiny", EngineConfig(max_rows=3)).config.max_rows == 3


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_row": 3}, "max_row"),
        ({"device": "tpu"}, "device"),
        ({"device": "CUDA"}, "device"),
        ({"device": "cuda:"}, "device"),
        ({"device": "cuda:-1"}, "device"),
        ({"device": "cuda:01"}, "device"),  # torch knows neither this nor the next
        ({"device": "cuda:\u0661"}, "device"),
        ({"device": None}, "device"),
        ({"dtype": "float64"}, "dtype"),
        ({"kernels": "fast"}, "kernels"),
        ({"overload": "drop"}, "overload"),
        ({"pipeline_depth": 3}, "pipeline_depth"),
        ({"pipeline_depth": 0}, "pipeline_depth"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": True}, "max_rows"),
        ({"max_rows": 2.0}, "max_rows"),
        ({"max_rows": 10**30}, "max_rows"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"kv_pages": 0}, "kv_pages"),
        ({"kv_memory": -5}, "kv_memory"),
        ({"kv_pages": 5, "kv_memory": 5}, "kv_memory"),
        ({"page_size": 0}, "page_size"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: ") as caught:
        Engine("random:tiny", **settings)
    assert caught.value.field == field


def test_a_configuration_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="EngineConfig") as caught:
        Engine("random:tiny", {"max_rows": 3})  # type: ignore[arg-type]
    assert caught.value.field == "config"


@pytest.mark.parametrize("model", [None, 5, b"random:tiny", ["random:tiny"]])
def test_a_model_of_another_type_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Engine(model)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("model", "settings", "field"),
    [
        (SimModel(), {"device": "cpu"}, "device"),
        (SimModel(), {"kv_memory": 1000}, "kv_memory"),
        ("random:tiny", {"device": "sim"}, "device"),
        ("random:tiny", {"kv_memory": 1}, "kv_memory"),
        ("random:tiny", {"kernels": "native", "dtype": "float16"}, "kernels"),
    ],
)
async def test_settings_that_do_not_go_with_the_model(model: Any, settings: dict[str, Any], field: str) -> None:
    engine = Engine(model, **settings)
    with pytest.raises(InvalidRequest) as caught:
        await engine.start()
    assert caught.value.field == field
    with pytest.raises(EngineClosed):
        await engine.generate([1])


async def test_a_model_that_is_not_there() -> None:
    engine = Engine("random:enormous")
    with pytest.raises(ModelError, match="enormous"):
        await engine.start()
    await engine.aclose()


async def test_a_shorter_model_length_is_the_engines_and_not_the_models() -> None:
    model = SimModel(max_model_len=100)
    async with Engine(model, max_model_len=10) as engine:
        assert engine.limits.max_model_len == 10
        assert len((await engine.generate([1], max_tokens=None, ignore_eos=True)).token_ids) == 9
    for other in (model, "random:tiny"):
        with pytest.raises(InvalidRequest, match="at most the model's") as refused:
            await Engine(other, max_model_len=1_000_000).start()
        assert refused.value.field == "max_model_len"


async def test_the_simulated_device_takes_no_setting_that_it_would_ignore() -> None:
    for field, value in {"dtype": "float16", "kernels": "native", "kv_memory": 1 << 20}.items():
        with pytest.raises(InvalidRequest) as refused:
            await Engine(SimModel(), **{field: value}).start()  # type: ignore[arg-type]
        assert refused.value.field == field


@pytest.mark.parametrize("memory", [30_000, 100_000])
async def test_memory_is_counted_in_whole_pages(memory: int) -> None:
    page = 3 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, KV heads, head_dim, bytes
    async with Engine("random:tiny", dtype="float32", kv_memory=memory) as engine:
        assert engine.stats().pages_free == memory // page


# Sampling parameters

BAD_PARAMETERS: list[tuple[str, Any]] = [
    ("max_token", 5),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("min_tokens", -1),
    ("min_tokens", 257),
    ("min_tokens", None),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_k", -1),
    ("top_k", 1.0),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", float("nan")),
    ("top_p", -(10**400)),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", [5]),
    ("stop", None),
    ("stop", "\ud800"),
    ("stop", ["x"] * 65),
    ("stop_token_ids", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [1] * 65),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("logprobs", -1),
    ("logprobs", 65),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 65),
    ("prompt_logprobs", False),
    ("echo", 0),
    ("echo", None),
    ("n", 0),
    ("n", 65),
    ("n", True),
    ("n", 1.0),
    *[
        (f"{name}_penalty", value)
        for name in ("presence", "frequency")
        for value in (2.1, -2.1, float("nan"), False, None, "1")
    ],
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 10.5),
    ("repetition_penalty", True),
    ("repetition_penalty", float("inf")),
    ("logit_bias", None),
    ("logit_bias", 5),
    ("logit_bias", [1, 2]),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {5: 100.1}),
    ("logit_bias", {5: -101}),
    ("logit_bias", {5: float("nan")}),
    ("logit_bias", {5: None}),
    ("logit_bias", [(5, 1.0), (5, 2.0)]),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", 5),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [0] * ((1 << 20) + 1)),
    ("allowed_token_ids", [1.0]),
    ("allowed_token_ids", [False]),
    ("bad_words", None),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [5]),
    ("bad_words", ["\ud800"]),
    ("bad_words", ["x"] * 257),
    ("bad_words", ["x" * 1025]),
    ("processor", 5),
    ("processor", "f"),
    ("json_schema", "object"),
    ("json_schema", ["object"]),
    ("json_schema", True),
    ("json_schema", {"const": float("nan")}),
    ("json_schema", {"const": object()}),
    ("json_schema", {"const": "\ud800"}),
    ("json_schema", {"const": "x" * (1 << 18)}),
    ("json_object", None),
    ("json_object", 1),
    ("regex", ""),
    ("regex", b"x"),
    ("regex", "x" * ((1 << 18) + 1)),
    ("regex", "\udfff"),
    ("choices", []),
    ("choices", "yes"),
    ("choices", ["yes", ""]),
    ("choices", [1]),
    ("choices", ["x"] * 4097),
    ("choices", ["x" * (1 << 17)] * 3),
    ("grammar", ""),
    ("grammar", 5),
    ("priority", 1.0),
    ("priority", None),
    ("priority", 2**31),
    ("priority", -(2**31) - 1),
    ("deadline", 0),
    ("deadline", -1.0),
    ("deadline", float("inf")),
    ("deadline", float("nan")),
    ("deadline", True),
    ("deadline", "1"),
    ("use_prefix_cache", 1),
    ("use_prefix_cache", "no"),
]


@pytest.fixture(scope="module")
def unstarted() -> Engine:
    return Engine(SimModel())


@pytest.mark.parametrize(("field", "value"), BAD_PARAMETERS)
def test_impossible_parameters_are_refused_at_the_call_by_name(unstarted: Engine, field: str, value: Any) -> None:
    """Not at the first step of the stream: `stream` itself raises, before anything is awaited."""
    with pytest.raises(InvalidRequest, match=rf"^{field}: ") as caught:
        unstarted.stream([1], **{field: value})
    assert caught.value.field == field
    with pytest.raises(InvalidRequest):
        unstarted.chat_stream([], **{field: value})


async def test_a_refused_request_leaves_the_engine_as_it_was(tiny: Engine) -> None:
    for field, value in BAD_PARAMETERS:
        with pytest.raises(InvalidRequest):
            await tiny.generate([1], **{field: value})
    assert tiny.stats().steps == 0
    assert len((await tiny.generate([1], max_tokens=3)).token_ids) == 3


async def test_parameters_by_keyword_go_before_those_of_the_struct(tiny: Engine) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len((await tiny.generate([1], params)).token_ids) == 3
    assert len((await tiny.generate([1], params, max_tokens=4)).token_ids) == 4
    assert params.max_tokens == 3
    with pytest.raises(InvalidRequest) as caught:
        await tiny.generate([1], params, max_tokens=-1)
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidRequest) as caught:
        await tiny.generate([1], {"max_tokens": 3})  # type: ignore[arg-type]
    assert caught.value.field == "params"


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 10**30},
        {"max_tokens": None, "min_tokens": 10**30},
        {"max_tokens": 10**30, "min_tokens": 10**20},
        {"max_tokens": 3, "top_k": 10**30, "temperature": 1},
        {"max_tokens": 3, "temperature": 1e-300},
        {"max_tokens": 3, "temperature": 100, "top_p": 1e-300, "min_p": 1},
        {"max_tokens": 3, "seed": 2**64 - 1, "temperature": 1},
        {"max_tokens": 3, "logprobs": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["sim", "cpu"])
async def test_huge_and_tiny_values_do_what_they_say(device: str, sampling: dict[str, Any]) -> None:
    model = SimModel(max_model_len=30) if device == "sim" else "random:tiny"
    async with Engine(model, max_model_len=30, max_rows=2) as engine:
        done = await engine.generate([1], ignore_eos=True, **sampling)
        assert len(done.token_ids) == min(sampling["max_tokens"] or 29, 29)
        assert done.finish_reason == "length"
        await engine.generate([1], max_tokens=1)  # it lives


# Prompts

BAD_PROMPTS: list[Any] = [
    [],
    "",
    (),
    None,
    5,
    2.5,
    object(),
    b"bytes",
    bytearray(b"bytes"),
    {"a": 1},
    {1: 2},
    {1, 2},
    [True, False],
    [1, True],
    [1.0, 2.0],
    [1, 2.5],
    ["a"],
    ["1"],
    [None],
    [[1, 2]],
    [1, [2]],
    [[1], [2, 3]],
    [-1],
    [512],
    [2**31],
    [2**63],
    [2**70],
    [-1, 2**63],
    np.array(5),
    np.array([[1, 2]]),
    np.array([1.0]),
    np.array([True]),
    np.array([1, 600]),
    np.array([-1], np.int8),
    np.array([1, None]),
]


async def test_prompts_that_are_refused(tiny: Engine) -> None:
    for prompt in BAD_PROMPTS:
        with pytest.raises(InvalidRequest, match=r"^prompt: ") as caught:
            await tiny.generate(prompt)
        assert caught.value.field == "prompt", prompt
        with pytest.raises(InvalidRequest):
            await anext(tiny.stream(prompt))
    assert tiny.stats().steps == 0


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        np.array,
        lambda ids: np.array(ids, np.uint16),
        lambda ids: np.array(ids, np.int64)[::1],
        lambda ids: [np.int64(i) for i in ids],
        lambda ids: range(ids[0], ids[-1] + 1),
    ],
)
async def test_token_ids_in_any_sequence(tiny: Engine, make: Callable[[list[int]], Any]) -> None:
    ids = [3, 4, 5, 6]
    expected = await tiny.generate(ids, max_tokens=8)
    assert (await tiny.generate(make(ids), max_tokens=8)).token_ids == expected.token_ids
    assert all(type(token) is int for token in expected.token_ids)


async def test_a_prompt_array_is_copied(tiny: Engine) -> None:
    ids = np.array([3, 4, 5, 6], np.int32)
    expected = await tiny.generate(ids, max_tokens=8)
    async with tiny.stream(ids, max_tokens=8) as stream:
        ids[:] = 0
        assert (await stream.completion()).token_ids == expected.token_ids


async def test_a_prompt_that_leaves_no_room_is_too_long() -> None:
    async with Engine(SimModel(max_model_len=20)) as engine:
        with pytest.raises(PromptTooLong, match="20") as caught:
            await engine.generate([1] * 20)
        assert caught.value.field == "prompt"
        done = await engine.generate([1] * 19, max_tokens=None)
        assert (len(done.token_ids), done.finish_reason) == (1, "length")


async def test_a_prompt_that_never_fits_the_pages_is_refused_at_the_call() -> None:
    async with Engine(SimModel(), kv_pages=3, page_size=4) as engine:
        with pytest.raises(PromptTooLong, match="kv_pages"):
            await engine.generate([1] * 6, max_tokens=8)
        done = await engine.generate([1] * 6, max_tokens=7, ignore_eos=True)
        assert len(done.token_ids) == 7
        assert engine.stats().pages_used == 0


async def test_stop_token_ids_are_of_the_vocabulary(tiny: Engine) -> None:
    for token in (512, 2**40, 2**70):
        with pytest.raises(InvalidRequest) as caught:
            await tiny.generate([1], stop_token_ids=[token])
        assert caught.value.field == "stop_token_ids"


# Text


@pytest.mark.parametrize("text", ["Hello, world", "naïve 日本語 🙂", " ", "x" * 5000])
async def test_tokenizing_round_trip(tiny: Engine, text: str) -> None:
    ids = await tiny.tokenize(text)
    assert all(type(token) is int for token in ids)
    assert await tiny.detokenize(ids) == text
    assert await tiny.detokenize(np.array(ids)) == text
    assert (await tiny.generate(text[:100], max_tokens=4)) is not None


async def test_a_text_is_the_same_as_its_tokens(tiny: Engine) -> None:
    by_text = await tiny.generate("The same", max_tokens=8)
    by_ids = await tiny.generate(await tiny.tokenize("The same"), max_tokens=8)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == by_ids.text == await tiny.detokenize(by_ids.token_ids)


async def test_text_of_another_type_is_refused(tiny: Engine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tiny.tokenize([1, 2])  # type: ignore[arg-type]
    assert caught.value.field == "text"
    for ids in ("text", [512], [-1], [1.5], None):
        with pytest.raises(InvalidRequest) as caught:
            await tiny.detokenize(ids)  # type: ignore[arg-type]
        assert caught.value.field == "ids"
    assert await tiny.detokenize([]) == ""
    for field, call in (("prompt", tiny.generate), ("text", tiny.tokenize)):
        for text in ("\ud800", "long " * 200 + "\udfff"):
            with pytest.raises(InvalidRequest, match=rf"^{field}: .*surrogate") as caught:
                await call(text)
            assert caught.value.field == field


async def test_chat_without_a_template_is_refused(tiny: Engine) -> None:
    assert not tiny.can_chat
    for call in (tiny.chat, lambda messages: anext(tiny.chat_stream(messages))):
        with pytest.raises(InvalidRequest, match="template") as caught:
            await call([{"role": "user", "content": "Hi"}])
        assert caught.value.field == "messages"


async def test_what_is_no_prompt_is_told_what_it_is_for(tiny: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: must be text or a list .*: messages are for chat\(\)"):
        await tiny.generate([{"role": "user", "content": "Hi"}])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=r"^ids: must be a list of token ids$"):
        await tiny.detokenize("hi")  # type: ignore[arg-type]
