"""Conversations, through the model's own template."""

import pytest
from engine.machines import Counting, machine

from aphoton import InvalidRequest

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('no ' ~ message.role) }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


async def test_a_conversation_is_its_rendered_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(monkeypatch, Counting(), template=TEMPLATE) as engine:
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": [{"type": "text", "text": "naïve 🙂?"}]},
        ]
        text = "<user>Hi<assistant>Hello<user>naïve 🙂?<answer>"
        done = await engine.chat(messages, max_tokens=5)
        assert done.usage.prompt_tokens == len(text.encode())
        assert done.token_ids == (await engine.generate(text, max_tokens=5)).token_ids
        stream = engine.chat_stream(messages, max_tokens=5)
        assert "".join([piece.text async for piece in stream]) == done.text
        assert (await stream.completion()).token_ids == done.token_ids
        assert engine.can_chat


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "Hi",
        5,
        [],
        ["Hi"],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": 5, "content": "Hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "tool", "content": "refused by the template"}],
        [{"role": "user", "content": "\ud800"}],
    ],
    ids=str,
)
async def test_messages_of_another_form_are_refused(messages: object, monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(monkeypatch, Counting(), template=TEMPLATE) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.chat(messages)  # type: ignore[arg-type]
        assert caught.value.field.startswith("messages")
        assert engine.stats().steps == 0
        assert (await engine.chat([{"role": "user", "content": "Hi"}], max_tokens=2)).usage.completion_tokens == 2
