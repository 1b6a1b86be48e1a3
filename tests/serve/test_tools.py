"""Tool calls through the service."""

import json
from typing import Any

import pytest
from sayer import TEMPLATE, let_sims_chat, saying
from serving import serving

from aphoton_serve.local import LocalBackend

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
]
HI: list[Any] = [{"role": "user", "content": "Look!"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


@pytest.mark.usefixtures("sims")
async def test_calls_are_told_as_calls() -> None:
    models = {"calls": saying(f"I look. {CALL}\n{CALL}"), "one": saying(CALL)}
    async with serving(LocalBackend(models, kv_pages=20_000)) as served:
        create = served.ai.chat.completions.create
        whole = (await create(model="calls", messages=HI, tools=TOOLS)).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == "I look. "
        assert whole.message.tool_calls is not None
        first, second = whole.message.tool_calls
        assert first.id != second.id and first.type == second.type == "function"
        assert first.function.name == "look" and json.loads(first.function.arguments) == {"at": "sky"}

        text, calls, finish = "", [], []
        async for chunk in await create(model="calls", messages=HI, tools=TOOLS, stream=True):
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            finish.append(choice.finish_reason)
        assert text == "I look. " and finish[-1] == "tool_calls" and set(finish[:-1]) == {None}
        assert [(c.index, c.function and c.function.name) for c in calls] == [(0, "look"), (1, "look")]

        alone = (await create(model="calls", messages=HI, tools=TOOLS, parallel_tool_calls=False)).choices[0]
        assert len(alone.message.tool_calls or ()) == 1
        bare = (await create(model="one", messages=HI, tools=TOOLS)).choices[0]
        assert bare.message.content is None
        # Without tools, or with none to be used, it is the model's own text.
        assert (await create(model="one", messages=HI)).choices[0].message.content == CALL
        none = (await create(model="one", messages=HI, tools=TOOLS, tool_choice="none")).choices[0]
        assert none.message.content == CALL and none.finish_reason == "stop"


@pytest.mark.parametrize("takes", [True, False])
async def test_the_model_hears_of_them(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    let_sims_chat(monkeypatch, ("{{ tools | tojson }}" if takes else "") + TEMPLATE)
    async with serving(LocalBackend({"m": saying("ok")}, kv_pages=20_000)) as served:
        without = await served.ai.chat.completions.create(model="m", messages=HI)
        with_them = await served.ai.chat.completions.create(model="m", messages=HI, tools=TOOLS)
        assert without.usage is not None and with_them.usage is not None
        more = with_them.usage.prompt_tokens - without.usage.prompt_tokens
        assert more > (len(json.dumps(TOOLS)) - len("none") - 20 if takes else 400)
