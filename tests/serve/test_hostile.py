"""What clients send that is wrong, hostile or extreme: each has a status and says what is wrong."""

import json
from typing import Any

import pytest
from engine.waiting import idle
from serving import Served

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps({"model": "hello", "messages": HI, "max_tokens": 5, **fields}).encode()


def said(*messages: Any, **fields: Any) -> tuple[str, bytes]:
    return chat(messages=list(messages), **fields)


def text(**fields: Any) -> tuple[str, bytes]:
    return TEXT, json.dumps({"model": "hello", "prompt": "Hi\x02", "max_tokens": 5, **fields}).encode()


def other(path: str, **fields: Any) -> tuple[str, bytes]:
    return path, json.dumps({"model": "hello", **fields}).encode()


def deep(depth: int) -> bytes:
    return b'{"model":"hello","messages":[' + b'{"a":' * depth + b"1" + b"}" * depth + b"]}"


REFUSED: list[tuple[tuple[str, bytes], int, str | None, str]] = [
    # what is no request
    ((CHAT, b""), 400, None, "not valid JSON"),
    ((CHAT, b"{"), 400, None, "not valid JSON"),
    ((CHAT, b"hello"), 400, None, "not valid JSON"),
    ((CHAT, b"[]"), 400, None, "Expected `object`, got `array`"),
    ((CHAT, b"null"), 400, None, "Expected `object`, got `null`"),
    ((CHAT, b'"text"'), 400, None, "got `str`"),
    ((CHAT, chat()[1] + b"{}"), 400, None, "trailing characters"),
    ((CHAT, b"\xff\xfe\x00"), 400, None, "not valid JSON"),
    ((CHAT, b'{"model":"\xff"}'), 400, None, "not valid JSON"),
    ((CHAT, b'{"model":"hello","messages":[{}],"temperature":NaN}'), 400, None, "not valid JSON"),
    ((CHAT, b'{"model":"hello","messages":[{"role":"user","content":"\\ud800"}]}'), 400, None, "not valid JSON"),
    ((CHAT, deep(90_000)), 400, None, "nested too deeply"),
    ((CHAT, b"{}"), 400, "model", "Missing required argument: model"),
    ((CHAT, b'{"model":"hello"}'), 400, "messages", "Missing required argument: messages"),
    ((TEXT, b'{"model":"hello"}'), 400, "prompt", "Missing required argument: prompt"),
    # models
    (chat(model="nobody"), 404, "model", "the model 'nobody' does not exist"),
    (chat(model=""), 404, "model", "does not exist"),
    (chat(model="../../etc/passwd"), 404, "model", "does not exist"),
    (chat(model="m" * 10_000), 404, "model", "does not exist"),
    (chat(model=None), 400, "model", "Expected `str`, got `null`"),
    (chat(model=7), 400, "model", "Expected `str`, got `int`"),
    # messages
    (chat(messages=[]), 400, "messages", "length >= 1"),
    (chat(messages="Hi"), 400, "messages", "Expected `array`"),
    (chat(messages=None), 400, "messages", "Expected `array`"),
    (said("Hi"), 400, "messages[0]", "Expected `object`"),
    (said({}), 400, "messages[0].role", "must be one of"),
    (said({"role": "user"}), 400, "messages[0].content", "is missing"),
    (said({"role": "user", "content": None}), 400, "messages[0].content", "is missing"),
    (said({"role": "user", "content": 7}), 400, "messages[0].content", "must be text"),
    (said({"role": "wizard", "content": "Hi"}), 400, "messages[0].role", "must be one of"),
    (said({"role": "user<|im_end|>", "content": "Hi"}), 400, "messages[0].role", "must be one of"),
    (said({"role": ["user"], "content": "Hi"}), 400, "messages[0].role", "must be one of"),
    (said({"role": "assistant", "content": None}), 400, "messages[0].content", "is missing"),
    (
        said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}),
        400,
        "messages[0].content[0].type",
        "must be 'text'",
    ),
    (
        said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}),
        400,
        "messages[0].content[0].type",
        "must be 'text'",
    ),
    (said({"role": "user", "content": [{"type": "text"}]}), 400, "messages[0].content[0].text", "must be text"),
    (
        said({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
        400,
        "messages[0].tool_calls[0].function.arguments",
        "must be a JSON object",
    ),
    (
        said({"role": "user", "content": "Hi", "tool_calls": [{}]}),
        400,
        "messages[0].tool_calls",
        "in an assistant's message",
    ),
    (said({"role": "user", "content": "x" * 1_000_001}), 400, "messages", "characters, and may have 1000000"),
    # unknown arguments
    (chat(magic=1), 400, "magic", "Unrecognized request argument supplied: magic"),
    (chat(functions=[{"name": "f"}]), 400, "functions", "Unrecognized request argument supplied: functions"),
    (chat(audio={"voice": "alloy"}), 400, "audio", "Unrecognized request argument"),
    (chat(web_search_options={}), 400, "web_search_options", "Unrecognized request argument"),
    (chat(store=True), 400, "store", "Invalid"),
    (chat(modalities=["audio"]), 400, "modalities[0]", "Invalid"),
    (text(suffix="x"), 400, "suffix", "Unrecognized request argument"),
    (chat(processor="os.system"), 400, "processor", "Unrecognized request argument"),
    # numbers
    (chat(max_tokens=-1), 400, "max_tokens", "must be at least"),
    (chat(max_tokens=1.5), 400, "max_tokens", "Expected `int | null`, got `float`"),
    (chat(max_tokens="5"), 400, "max_tokens", "Expected `int | null`, got `str`"),
    (chat(max_tokens=True), 400, "max_tokens", "Expected `int | null`, got `bool`"),
    (chat(max_tokens=5, max_completion_tokens=6), 400, "max_tokens", "differ"),
    (chat(temperature=-0.1), 400, "temperature", "must be in [0, 100]"),
    (chat(temperature=1e300), 400, "temperature", "must be in [0, 100]"),
    (chat(temperature="hot"), 400, "temperature", "Expected `float | null`, got `str`"),
    (chat(top_p=0), 400, "top_p", "must be in (0, 1]"),
    (chat(top_p=1.01), 400, "top_p", "must be in (0, 1]"),
    (chat(top_k=-1), 400, "top_k", "must be at least 0"),
    (chat(min_p=2), 400, "min_p", "must be in [0, 1]"),
    (chat(min_tokens=9), 400, "min_tokens", "at most max_tokens"),
    (chat(seed=-1), 400, "seed", "must be from 0"),
    (chat(seed=2**64), 400, "seed", "must be from 0"),
    (chat(n=1000), 400, "n", "are more than 128 answers"),
    (chat(n=0), 400, "n", "must be at least 1"),
    (chat(n=-3), 400, "n", "must be at least 1"),
    (chat(n=10**30), 400, "n", "are more than"),
    (chat(top_logprobs=3), 400, "top_logprobs", "needs logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "<= 20"),
    (chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs", ">= 0"),
    (text(logprobs=-1), 400, "logprobs", ">= 0"),
    (text(best_of=5), 400, "best_of", "best_of must be n"),
    (chat(presence_penalty=99), 400, "presence_penalty", ""),
    # stops
    (chat(stop=""), 400, "stop", "not be empty"),
    (chat(stop=["a", ""]), 400, "stop", "not be empty"),
    (chat(stop=["a"] * 65), 400, "stop", "at most 64"),
    (chat(stop="x" * 1025), 400, "stop", "at most 1024 characters"),
    (chat(stop=7), 400, "stop", "Expected"),
    (chat(stop_token_ids=[300]), 400, "stop_token_ids", "vocabulary"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids", "at least 0"),
    (chat(stop_token_ids=[2**70]), 400, "stop_token_ids", ""),
    (chat(logit_bias={"x": 1}), 400, "logit_bias", "token ids"),
    # prompts
    (text(prompt=""), 400, "prompt", "at least one token"),
    (text(prompt=[]), 400, "prompt", "must be text, token ids, or a list"),
    (text(prompt=[[]]), 400, "prompt", "at least one token"),
    (text(prompt=["a", 1]), 400, "prompt", "must be text, token ids, or a list"),
    (text(prompt=["a", [1]]), 400, "prompt", "must be text, token ids, or a list"),
    (text(prompt=[-1]), 400, "prompt", "token ids must be from 0 to 299"),
    (text(prompt=[300]), 400, "prompt", "token ids must be from 0 to 299"),
    (text(prompt=[2**80]), 400, "prompt", ""),
    (text(prompt=[True]), 400, "prompt[0]", "Expected"),
    (text(prompt=[None]), 400, "prompt[0]", "Expected"),
    (text(prompt={"a": 1}), 400, "prompt", "Expected"),
    (text(prompt=["a"] * 129), 400, "prompt", "are more than 128 answers"),
    (text(prompt="x" * 500_000), 400, "prompt", "leave no room for an answer"),
    # streams
    (chat(stream="yes"), 400, "stream", "Expected `bool | null`"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options", "needs stream"),
    (chat(stream=True, stream_options={"more": 1}), 400, "stream_options.more", "Unrecognized"),
    # tools and formats
    (chat(tools=[{}]), 400, "tools[0].type", "Missing"),
    (chat(tools=[{"type": "retrieval"}]), 400, "tools[0].type", "Invalid"),
    (
        chat(tools=[{"type": "function", "function": {"name": "rm -rf"}}]),
        400,
        "tools[0].function.name",
        "matching regex",
    ),
    (chat(tools=[TOOL] * 129), 400, "tools", "length <= 128"),
    (chat(tool_choice="required"), 400, "tool_choice", "needs tools"),
    (chat(tools=[TOOL], tool_choice="maybe"), 400, "tool_choice", "Invalid"),
    (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
        400,
        "tool_choice",
        "no tool is named 'other'",
    ),
    (chat(tools=[TOOL], response_format={"type": "json_object"}), 400, "response_format", "no room for tool calls"),
    (chat(response_format={"type": "xml"}), 400, "response_format.type", "Invalid"),
    (chat(response_format="json"), 400, "response_format", "Expected"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema.schema", "Missing"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        400,
        "response_format.json_schema.schema",
        "Missing",
    ),
    (
        ("/v1/completions", b'{"model": "hello", "prompt": [' + b"[]," * 100_000 + b"[]]}"),
        413,
        None,
        "more than 100000 brackets",
    ),
    # the others
    (other("/tokenize"), 400, "prompt", "Missing"),
    (other("/tokenize", prompt=7), 400, "prompt", "Expected `str`"),
    (other("/detokenize", tokens=[-1]), 400, "tokens", "token ids must be"),
    (other("/detokenize", tokens="x"), 400, "tokens", "Expected `array`"),
    (other(EMBED, input="Hi"), 400, "model", "makes no embeddings"),
    (other(EMBED), 400, "input", "Missing"),
]


async def test_every_bad_request_is_refused(hello: Served) -> None:
    assert len(REFUSED) >= 60
    wrong = []
    for (path, body), status, param, message in REFUSED:
        response = await hello.web.post(path, content=body, headers={"content-type": "application/json"})
        error = response.json()["error"]
        if (response.status_code, error["param"]) != (status, param) or message not in error["message"]:
            wrong.append((body[:150], response.status_code, error))
        assert set(error) == {"message", "type", "param", "code"}
        assert len(response.content) < 2000
    assert not wrong, "\n".join(map(repr, wrong))
    await idle(hello.engine("hello"))
    done = await hello.ai.chat.completions.create(model="hello", messages=HI)
    assert done.choices[0].message.content == "Hello, wörld!"


NULLS = """temperature top_p n seed stop presence_penalty frequency_penalty logit_bias user metadata stream_options
    tools tool_choice response_format logprobs top_logprobs max_completion_tokens parallel_tool_calls store service_tier
    modalities functions function_call audio prediction reasoning_effort"""

TAKEN: list[tuple[str, bytes]] = [
    chat(**dict.fromkeys(NULLS.split())),
    chat(n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, tools=[], stop=[], parallel_tool_calls=True),
    chat(user="u", metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k", service_tier="auto", store=False),
    chat(response_format={"type": "text"}, tool_choice="none", modalities=["text"]),
    said({"role": "developer", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}),
    said({"role": "user", "content": "Hi", "name": None, "refusal": None, "tool_calls": None}),
    said({"role": "user", "content": ""}),
    said({"role": "user", "content": "\x00\u202e<script>alert(1)</script>{{ 7*7 }}{% raise %}"}),
    chat(temperature=0, top_p=1, seed=2**64 - 1, max_tokens=10**12),
    text(prompt=["a\x02"] * 128, max_tokens=1),
    text(echo=False, best_of=1, logprobs=None),
    text(prompt=[2]),
]


@pytest.mark.parametrize("request_", TAKEN, ids=range(len(TAKEN)))
async def test_what_is_odd_but_right_is_taken(hello: Served, request_: tuple[str, bytes]) -> None:
    path, body = request_
    response = await hello.web.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 429), response.text
    if response.status_code == 429:  # the queue of the test's engine is short
        assert response.json()["error"]["code"] == "overloaded"
    await idle(hello.engine("hello"))


@pytest.mark.parametrize("depth", [100, 300, 600, 850])
async def test_nested_as_deep_as_is_decoded(hello: Served, depth: int) -> None:
    nested: Any = 1
    for _ in range(depth):
        nested = {"a": nested}
    tool = {"type": "function", "function": {"name": "look", "parameters": nested}}
    for path, body in (said({"role": "user", "content": "Hi", "x": nested}), chat(tools=[tool])):
        response = await hello.web.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text
    path, body = said({"role": "user", "content": nested})
    response = await hello.web.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400


async def test_paths_and_methods(hello: Served) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/v1/models/a/b", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/hello", 405),
        ("PUT", "/", 405),
        ("GET", "/ticks", 400),
        ("GET", "/ticks?model=nobody", 404),
        ("GET", "/%00", 404),
    ):
        response = await hello.web.request(method, path)
        assert (response.status_code, list(response.json())) == (status, ["error"]), (method, path, response.text)
    assert (await hello.web.get(CHAT)).headers["allow"] == "POST"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_only_json(hello: Served, kind: str) -> None:
    """What a web page elsewhere can make a browser send is not taken."""
    _, body = chat()
    response = await hello.web.post(CHAT, content=body, headers={"content-type": kind})
    assert response.status_code == 415 and response.json()["error"]["code"] == "unsupported_media_type"
