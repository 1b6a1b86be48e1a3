"""The README's `serve run`, word for word, and OpenAI's own package. Ray takes its time to start, so it is started
once."""

import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import pytest_asyncio
from program import program
from pydantic import BaseModel

from aphoton import Engine

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.real_model,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

README = Path(__file__).parents[2] / "README.md"
READY = re.compile(r"(Application 'default' is ready)")
HI: list[Any] = [{"role": "user", "content": "Name three colours."}]


class Review(BaseModel):
    mood: Literal["happy", "neutral", "angry"]
    stars: Literal[1, 2, 3, 4, 5]


def command() -> list[str]:
    (line,) = re.findall(r"^serve run .*$", README.read_text(), re.MULTILINE)
    name, *arguments = shlex.split(line, comments=True)
    return [str(Path(sys.executable).with_name(name)), *arguments]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ai(smollm2: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of what the command serves, which at the end gets a Ctrl-C. It runs on a Ray of the test's, whose HTTP
    port is a free one."""
    import ray

    from aphoton_serve.cluster import local_cluster

    with local_cluster(cpus=4) as url:
        address = ray.get_runtime_context().gcs_address
        async with program(*command(), RAY_ADDRESS=address) as it:
            await it.expect(READY)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
                yield client
            it.process.send_signal(signal.SIGINT)
            assert await it.end() == 0
            assert "Traceback" not in it.text
            async with httpx.AsyncClient() as web:
                with pytest.raises(httpx.ConnectError):
                    await web.get(url)


def parsed(answer: BaseModel) -> BaseModel:
    """The same, checked against the package's types, which by itself it does not do."""
    return type(answer).model_validate(answer.to_dict())


async def test_chat_whole_and_as_a_stream(ai: openai.AsyncOpenAI) -> None:
    async with Engine("smollm2") as engine:
        direct = await engine.chat(HI, max_tokens=24)
    assert [parsed(model).id async for model in ai.models.list()] == ["smollm2"]
    ask: dict[str, Any] = {"model": "smollm2", "messages": HI, "max_tokens": 24, "temperature": 0}
    whole = await ai.chat.completions.create(**ask)
    assert parsed(whole) == whole
    assert whole.choices[0].message.content == direct.text
    assert whole.choices[0].finish_reason == direct.finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == direct.usage.prompt_tokens
    assert whole.usage.completion_tokens == direct.usage.completion_tokens

    stream = await ai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert all(parsed(chunk) == chunk for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == direct.text
    assert chunks[-2].choices[0].finish_reason == direct.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_schema(ai: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "temperature": 1, "seed": 3}
    for text in ("The shoes fit perfectly!", "Broken on the first day."):
        done = await ai.chat.completions.parse(
            **ask, messages=[{"role": "user", "content": f"Rate this review: {text}"}], response_format=Review
        )
        assert isinstance(done.choices[0].message.parsed, Review) and done.choices[0].finish_reason == "stop"
    async with ai.chat.completions.stream(**ask, messages=HI, response_format=Review) as events:
        final = await events.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Review)


async def test_stop(ai: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "prompt": "One, two, three,", "max_tokens": 16, "temperature": 0}
    free = await ai.completions.create(**ask)
    assert parsed(free) == free
    text = free.choices[0].text
    stop = text[6:9]
    cut = await ai.completions.create(**ask, stop=["no such text", stop])
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    stream = await ai.completions.create(**ask, stop=stop, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == cut.choices[0].text
    assert chunks[-1].finish_reason == "stop"


async def test_logprobs(ai: openai.AsyncOpenAI) -> None:
    chat = await ai.chat.completions.create(
        model="smollm2", messages=HI, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert parsed(chat) == chat
    scores = chat.choices[0].logprobs
    assert scores is not None and scores.content is not None and len(scores.content) == 6
    assert b"".join(bytes(one.bytes or []) for one in scores.content).decode() == chat.choices[0].message.content
    for one in scores.content:  # greedy: the likeliest
        assert len(one.top_logprobs) == 3
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, max(top.logprob for top in one.top_logprobs))
    ask: dict[str, Any] = {"model": "smollm2", "prompt": "One, two,", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    text = await ai.completions.create(**ask)
    assert parsed(text) == text
    echoed = await ai.completions.create(**ask, echo=True)
    assert echoed.choices[0].text == "One, two," + text.choices[0].text
    told, all_told = text.choices[0].logprobs, echoed.choices[0].logprobs
    assert told is not None and told.tokens is not None and told.token_logprobs is not None
    assert all_told is not None and all_told.tokens is not None and all_told.token_logprobs is not None
    assert "".join(all_told.tokens) == echoed.choices[0].text and all_told.token_logprobs[0] is None
    assert all_told.tokens[-4:] == told.tokens
    assert all_told.token_logprobs[-4:] == pytest.approx(told.token_logprobs)


async def test_errors(ai: openai.AsyncOpenAI) -> None:
    create: Any = ai.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="nobody", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as hot:
            await create(model="smollm2", messages=HI, temperature=1e9, stream=stream)
        assert hot.value.param == "temperature" and "must be in [0, 100]" in hot.value.message
        with pytest.raises(openai.BadRequestError) as long:
            await create(model="smollm2", messages=[{"role": "user", "content": "x " * 20_000}], stream=stream)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as schema:
        await create(
            model="smollm2",
            messages=HI,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}},
        )
    assert schema.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        await ai.embeddings.create(model="smollm2", input="Hi")
    with pytest.raises(openai.InternalServerError) as late:
        await create(model="smollm2", messages=HI, extra_headers={"X-Request-Timeout": "0.05"}, max_tokens=2000)
    assert (late.value.status_code, late.value.code) == (504, "timeout")
    stream = await create(
        model="smollm2",
        messages=HI,
        max_tokens=2000,
        stream=True,
        extra_headers={"X-Request-Timeout": "3"},
        extra_body={"ignore_eos": True},
    )
    with pytest.raises(openai.APIError, match="has taken 3 s") as cut:
        async for _ in stream:
            pass
    assert cut.value.code == "timeout"
    with pytest.raises(openai.APITimeoutError):
        await create(model="smollm2", messages=HI, max_tokens=2000, timeout=0.1)
