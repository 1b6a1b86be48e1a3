"""OpenAI's own client against the service."""

import openai
import pytest
from engine.waiting import idle
from sayer import END_OF_PROMPT
from serving import Served

from aphoton_serve.local import LocalBackend

HI = [{"role": "user", "content": "Hi"}]


async def test_models(real: Served) -> None:
    assert [model.id async for model in real.ai.models.list()] == ["tiny", "talker"]
    assert (await real.ai.models.retrieve("talker")).owned_by == "aphoton"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await real.ai.models.retrieve("nobody")


async def test_chat_equals_the_engine(real: Served) -> None:
    direct = await real.engine("talker").chat(HI, max_tokens=12)
    done = await real.ai.chat.completions.create(model="talker", messages=HI, max_tokens=12, temperature=0)
    (choice,) = done.choices
    assert choice.message.content == direct.text and choice.finish_reason == "length"
    assert choice.message.role == "assistant" and choice.message.tool_calls is None
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (direct.usage.prompt_tokens, 12)
    assert done.usage.total_tokens == direct.usage.prompt_tokens + 12


async def test_chat_streams_the_same(real: Served) -> None:
    direct = await real.engine("talker").chat(HI, max_tokens=12)
    stream = await real.ai.chat.completions.create(
        model="talker", messages=HI, max_completion_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    first, *_, finish, usage = chunks
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == direct.text
    assert finish.choices[0].finish_reason == "length" and not finish.choices[0].delta.content
    assert all(c.choices[0].finish_reason is None and c.usage is None for c in chunks[:-2])
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


async def test_no_usage_unless_asked(real: Served) -> None:
    stream = await real.ai.chat.completions.create(model="talker", messages=HI, max_tokens=2, stream=True)
    assert all(chunk.choices for chunk in [chunk async for chunk in stream])


async def test_completion_equals_the_engine(real: Served) -> None:
    direct = await real.engine("tiny").generate("Once", max_tokens=16)
    done = await real.ai.completions.create(model="tiny", prompt="Once", temperature=0)
    assert done.choices[0].text == direct.text and done.choices[0].finish_reason == "length"
    ids = await real.engine("tiny").tokenize("Once")
    again = await real.ai.completions.create(model="tiny", prompt=ids, temperature=0, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in again]) == direct.text


async def test_several_prompts(real: Served) -> None:
    texts = [(await real.engine("tiny").generate(prompt, max_tokens=4)).text for prompt in ("a", "b", "c")]
    done = await real.ai.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=4, temperature=0)
    assert [choice.text for choice in done.choices] == texts
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert done.usage is not None and done.usage.completion_tokens == 12 and done.usage.prompt_tokens == 3
    streamed = ["", "", ""]
    stream = await real.ai.completions.create(
        model="tiny", prompt=[[97], [98], [99]], max_tokens=4, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usages = []
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
        if not chunk.choices:
            usages.append(chunk.usage)
    assert streamed == texts
    assert [usage.completion_tokens for usage in usages if usage is not None] == [12]


async def test_seed(real: Served) -> None:
    async def text(seed: int) -> str | None:
        done = await real.ai.chat.completions.create(
            model="talker", messages=HI, max_tokens=12, temperature=2, top_p=0.9, seed=seed
        )
        return done.choices[0].message.content

    assert await text(1) == await text(1) != await text(2)


async def test_chat_logprobs(real: Served) -> None:
    direct = await real.engine("talker").chat(HI, max_tokens=6, logprobs=3)
    ask = {"model": "talker", "messages": HI, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    done = await real.ai.chat.completions.create(**ask)
    assert done.choices[0].logprobs is not None and direct.logprobs is not None
    content = done.choices[0].logprobs.content
    assert content is not None
    assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in direct.logprobs])
    assert [bytes(entry.bytes or []) for entry in content] == real.engine("talker").token_bytes(direct.token_ids)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    streamed = [
        entry
        async for chunk in await real.ai.chat.completions.create(**ask, stream=True)
        for entry in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ()
    ]
    assert streamed == content


async def test_completion_logprobs(real: Served) -> None:
    ask = {"model": "talker", "prompt": "Hi", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    done = await real.ai.completions.create(**ask)
    direct = await real.engine("talker").generate("Hi", max_tokens=5, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and direct.logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in direct.logprobs])
    assert logprobs.tokens is not None and logprobs.text_offset is not None and logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == 5 and logprobs.text_offset[0] == 0
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


async def test_stop(hello: Served) -> None:
    ask = {"model": "hello", "messages": HI}
    whole = await hello.ai.chat.completions.create(**ask)
    assert whole.choices[0].message.content == "Hello, wörld!" and whole.choices[0].finish_reason == "stop"
    cut = await hello.ai.chat.completions.create(**ask, stop=["wö", "x"])
    assert cut.choices[0].message.content == "Hello, " and cut.choices[0].finish_reason == "stop"
    stream = await hello.ai.completions.create(
        model="hello", prompt=END_OF_PROMPT, stop="ld", max_tokens=100, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, wör"


async def test_tokenize(real: Served) -> None:
    ids = await real.engine("talker").tokenize("Hello")
    answer = (await real.web.post("/tokenize", json={"model": "talker", "prompt": "Hello"})).json()
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    answer = (await real.web.post("/detokenize", json={"model": "talker", "tokens": ids})).json()
    assert answer == {"prompt": "Hello"}


async def test_errors_are_of_the_expected_classes(real: Served) -> None:
    create = real.ai.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="nobody", messages=HI)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as hot:
        await create(model="talker", messages=HI, temperature=1e9)
    assert hot.value.param == "temperature" and "must be in [0, 100]" in hot.value.message
    with pytest.raises(openai.BadRequestError) as long:
        await create(model="talker", messages=[{"role": "user", "content": "x" * 3000}])
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        await real.ai.embeddings.create(model="tiny", input="Hi")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        await create(model="tiny", messages=HI)
    with pytest.raises(openai.BadRequestError) as early:  # before the stream begins
        await create(model="talker", messages=HI, top_p=0, stream=True)
    assert early.value.param == "top_p"
    for model in ("tiny", "talker"):
        await idle(real.engine(model))


async def test_a_dead_engine(hello: Served) -> None:
    assert (await hello.web.get("/health")).status_code == 200

    def fail(_: str) -> None:
        raise OSError("/secret/path is on fire")

    stream = await hello.ai.chat.completions.create(model="endless", messages=HI, max_tokens=900_000, stream=True)
    await anext(stream)
    pipeline = hello.engine("endless")._pipeline
    assert pipeline is not None
    pipeline.device.launch = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(openai.APIError, match="the engine has died") as died:
        async for _ in stream:
            pass
    assert "secret" not in died.value.message and died.value.code == "engine_dead"
    with pytest.raises(openai.InternalServerError) as after:
        await hello.ai.chat.completions.create(model="endless", messages=HI)
    assert after.value.status_code == 503 and after.value.code == "engine_dead"
    health = await hello.web.get("/health")
    assert health.status_code == 503
    assert health.json()["models"] == {"hello": "ok", "endless": "EngineDead"}
    await hello.ai.chat.completions.create(model="hello", messages=HI)  # another engine is unharmed


def test_settings_of_a_backend() -> None:
    backend = LocalBackend({"sim": "sim"}, device="sim")
    assert backend.engine("sim").config.overload == "raise"
