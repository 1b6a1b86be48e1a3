"""`ChatTemplate`."""

from datetime import datetime
from typing import Any

import pytest

from aphoton.errors import InvalidRequest, ModelError
from aphoton.text import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
USER = [{"role": "user", "content": "Hi"}]


def refused(messages: Any, source: str = PLAIN) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render(messages)
    return caught.value.field, str(caught.value)


@pytest.mark.real_model
def test_smollm2(smollm2_chat: ChatTemplate) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    assert transformers.__version__
    conversation = [*USER, {"role": "assistant", "content": "Hello! "}, {"role": "user", "content": "<b>&'\n🙂"}]
    for messages in (USER, conversation, [{"role": "system", "content": "Be brief."}, *USER]):
        rendered, _ = render_jinja_template([messages], chat_template=smollm2_chat.source, add_generation_prompt=True)
        assert smollm2_chat.render(messages) == rendered[0]
    assert smollm2_chat.render(USER).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_contents() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate(PLAIN)
    assert template.render([{"role": "user", "content": parts}]) == "user:ab;>"
    assert template.render([{"role": "user", "content": ""}]) == "user:;>"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    source = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render([*USER, call]) == "f"


def test_what_templates_may_use() -> None:
    """Names, filters and tags that Hugging Face's templates rely on, and its white space rules."""
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.first %}{% continue %}{% endif %}\n"
        "    {% generation %}\n"
        "{{ m | tojson }}\n"
        "    {% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ bos_token }}{{ eos_token }}{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}"
        "{{ {'b': '<é>', 'a': [1]} | tojson(indent=1, sort_keys=true) }}"
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    year = datetime.now().year
    text = template.render([*USER, {"role": "assistant", "content": "<x>"}])
    assert text == (
        f'{{"role": "assistant", "content": "<x>"}}\n<s></s>{year}TrueTrue{{\n "a": [\n  1\n ],\n "b": "<é>"\n}}'
    )


def test_the_sandbox_holds() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        assert refused(USER, source)[0] == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_what_the_template_refuses(source: str, message: str) -> None:
    field, text = refused(USER, source)
    assert field == "messages"
    assert message in text


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match=r"not valid Jinja.*line 2"):
        ChatTemplate("\n{% for %}").render(USER)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("Hi", "messages"),
        (None, "messages"),
        ({"role": "user", "content": "Hi"}, "messages"),
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([{3: 4}], "messages[0]"),
        ([*USER, {"content": "Hi"}], "messages[1].role"),
        ([*USER, {"role": "", "content": "Hi"}], "messages[1].role"),
        ([{"role": 1, "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": None, "tool_calls": [1]}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
            "messages[0].content[1].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
)
def test_messages_of_another_form_are_named(messages: Any, field: str) -> None:
    assert refused(messages)[0] == field


def test_the_template_is_compiled_once() -> None:
    template = ChatTemplate(PLAIN)
    template.render(USER)
    compiled = template._template
    template.render(USER)
    assert template._template is compiled


def test_tools() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    user = [{"role": "user", "content": "Hi"}]
    takes = ChatTemplate("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}")
    assert takes.takes_tools
    assert takes.render(user, tools) == '[{"type": "function", "function": {"name": "look"}}]Hi'
    assert takes.render(user) == takes.render(user, []) == "Hi"
    plain = ChatTemplate("{{ messages[0].content }}")
    assert not plain.takes_tools and plain.render(user, []) == "Hi"
    with pytest.raises(InvalidRequest, match="does not take tools") as refused:
        plain.render(user, tools)
    assert refused.value.field == "tools"
    with pytest.raises(ModelError, match="not valid Jinja"):
        _ = ChatTemplate("{% if %}").takes_tools
