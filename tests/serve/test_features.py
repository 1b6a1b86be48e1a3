"""What clients ask of tokens, through the service, on a model with random weights."""

import asyncio
import json
import threading
from functools import partial
from typing import Any

import openai
import pytest
from engine.waiting import idle, until
from serving import Served

from aphoton import ConstraintFailed
from aphoton.sampling.grammarmasker import GrammarMasker
from aphoton_serve import sampling

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["color", "sure"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {"model": "talker", "messages": HI, "temperature": 1.5, "seed": 3}


PARAMETERS = {
    **SCHEMA,
    "properties": {"color": {"$ref": "#/$defs/Color"}, "sure": {"type": "boolean"}},
    "$defs": {"Color": {"enum": ["red", "green"]}},
}


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}


async def test_json_of_a_schema(real: Served) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "light", "schema": SCHEMA, "strict": True}}
    done = await real.ai.chat.completions.create(**ASK, response_format=wanted)
    assert done.choices[0].finish_reason == "stop"
    answer = json.loads(done.choices[0].message.content or "")
    assert answer["color"] in ("red", "green") and type(answer["sure"]) is bool and len(answer) == 2
    stream = await real.ai.chat.completions.create(**ASK, response_format=wanted, stream=True)
    assert json.loads("".join([c.choices[0].delta.content or "" async for c in stream])) == answer


async def test_a_schema_that_cannot_be(real: Served) -> None:
    for schema in ({"type": "nonsense"}, {"$ref": "http://10.0.0.1/schema"}, {"$ref": "file:///etc/passwd"}):
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await real.ai.chat.completions.create(**ASK, response_format=wanted, stream=stream)
            assert refused.value.param == "response_format"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_forced_call(real: Served, choice: Any, stream: bool) -> None:
    ask = {**ASK, "tools": [tool("look"), tool("listen")], "tool_choice": choice, "max_tokens": 200}
    if stream:
        chunks = [chunk.choices[0] async for chunk in await real.ai.chat.completions.create(**ask, stream=True)]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        finish = chunks[-1].finish_reason
        assert not any(chunk.delta.content for chunk in chunks)
    else:
        done = await real.ai.chat.completions.create(**ask)
        calls, finish = done.choices[0].message.tool_calls or [], done.choices[0].finish_reason
        assert done.choices[0].message.content is None
    (call,) = calls
    assert finish == "tool_calls"
    assert call.function.name in (["look"] if isinstance(choice, dict) else ["look", "listen"])
    assert json.loads(call.function.arguments)["color"] in ("red", "green")


async def test_several_answers(real: Served) -> None:
    done = await real.ai.chat.completions.create(**ASK, n=3, max_tokens=8)
    texts = [choice.message.content or "" for choice in done.choices]
    assert [choice.index for choice in done.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert done.usage is not None and done.usage.completion_tokens == 24
    streamed, finish, roles = ["", "", ""], [], []
    async for chunk in await real.ai.chat.completions.create(**ASK, n=3, max_tokens=8, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        finish += [choice.index] if choice.finish_reason else []
        roles += [choice.index] if choice.delta.role else []
    assert streamed == texts and sorted(finish) == sorted(roles) == [0, 1, 2]
    prompts = await real.ai.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in prompts.choices] == [0, 1, 2, 3]
    await idle(real.engine("talker"))


async def test_echo(real: Served) -> None:
    ask = {"model": "talker", "prompt": "Once", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    plain = await real.ai.completions.create(**ask)
    echo = await real.ai.completions.create(**ask, echo=True)
    assert echo.choices[0].text == "Once" + plain.choices[0].text
    logprobs = echo.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.tokens[:4] == list("Once") and logprobs.text_offset == [
        sum(len(token) for token in logprobs.tokens[:i]) for i in range(len(logprobs.tokens))
    ]
    assert logprobs.token_logprobs[0] is None and all(value < 0 for value in logprobs.token_logprobs[1:])
    scored = await real.ai.completions.create(**{**ask, "max_tokens": 0}, echo=True)
    assert scored.choices[0].text == "Once" and scored.choices[0].finish_reason == "length"


async def test_offsets_of_characters_that_are_several_tokens(real: Served) -> None:
    """Each byte is a token of this model."""
    text = "A 😀 é B"
    scored = await real.ai.completions.create(model="tiny", prompt=text, max_tokens=0, logprobs=1, echo=True)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset is not None
    assert scored.choices[0].text == text
    ends = [len(text.encode()[: i + 1].decode(errors="ignore")) for i in range(len(text.encode()))]
    assert logprobs.text_offset == [0, *ends[:-1]]


async def test_a_regex_that_gives_out(real: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once tokens have come: the client's own doing all the same."""
    accept = GrammarMasker.accept

    def give_out(self: GrammarMasker, token: int) -> bool:
        if self._count == 3:
            raise ConstraintFailed("regex", "no mask can be made any more: too many expressions")
        return accept(self, token)

    monkeypatch.setattr(GrammarMasker, "accept", give_out)
    asks: dict[str, Any] = {"model": "talker", "max_tokens": 20, "extra_body": {"regex": "[a-z]+"}}
    for create, prompt in (
        (real.ai.completions.create, {"prompt": "Hi"}),
        (real.ai.chat.completions.create, {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        with pytest.raises(openai.BadRequestError, match="no mask can be made") as wrong:
            await create(**asks, **prompt)
        assert wrong.value.param == "regex" and wrong.value.code == "constraint_failed"
        with pytest.raises(openai.APIError, match="no mask can be made"):
            async for _ in await create(**asks, **prompt, stream=True):
                pass
    await idle(real.engine("talker"))


async def test_a_call_with_half_a_character(real: Served) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>'
    asked: Any = {"role": "user", "content": "Hi"}
    create = partial(
        real.ai.chat.completions.create, model="talker", tools=[{"type": "function", "function": {"name": "f"}}]
    )
    done = await create(messages=[asked], extra_body={"choices": [call]})
    (made,) = done.choices[0].message.tool_calls or ()
    assert made.type == "function" and made.function.arguments == '{"a": "\ufffd"}'
    said: Any = done.choices[0].message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": made.id, "content": "7"}
    assert await create(messages=[asked, said, result], max_tokens=1)


async def test_bias_and_what_may_come(real: Served) -> None:
    ask: dict[str, Any] = {"model": "talker", "prompt": "Hi", "max_tokens": 6}
    (letter,) = await real.engine("talker").tokenize("z")
    biased = await real.ai.completions.create(**ask, logit_bias={str(letter): 100})
    assert biased.choices[0].text == "zzzzzz"
    allowed = await real.ai.completions.create(**ask, extra_body={"allowed_token_ids": [letter]})
    assert allowed.choices[0].text == "zzzzzz"
    matched = await real.ai.completions.create(**{**ask, "max_tokens": 20}, extra_body={"regex": "(ab|cd){3}"})
    assert len(matched.choices[0].text) == 6 and set(matched.choices[0].text) <= set("abcd")
    for key in ("999999", "1_0", " 5", "05", "\u0661", "-1", "x"):
        with pytest.raises(openai.BadRequestError) as wrong:
            await real.ai.completions.create(**ask, logit_bias={key: 1})
        assert wrong.value.param == "logit_bias"
    repeated = await real.ai.completions.create(**ask, logit_bias={str(letter): 5}, temperature=0)
    varied = await real.ai.completions.create(
        **ask, logit_bias={str(letter): 5}, temperature=0, presence_penalty=2, frequency_penalty=2
    )
    assert varied.choices[0].text.count("z") <= repeated.choices[0].text.count("z")


async def test_cached_tokens(real: Served) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 2}
    await real.ai.completions.create(**ask)
    again = await real.ai.completions.create(**ask)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 96


async def test_a_schema_is_checked_off_the_loop(real: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go, entered = threading.Event(), threading.Event()
    build = sampling._build

    def slow(*given: Any) -> Any:
        entered.set()
        assert go.wait(60), "the loop was blocked"
        return build(*given)

    monkeypatch.setattr(sampling, "_build", slow)
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "light", "schema": SCHEMA}}
    task = asyncio.create_task(real.ai.chat.completions.create(**ASK, response_format=wanted))
    await until(entered.is_set)
    assert (await real.web.get("/health")).status_code == 200
    go.set()
    assert json.loads((await task).choices[0].message.content or "")["color"] in ("red", "green")
