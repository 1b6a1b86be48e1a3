"""Tool calls in a model's text."""

import json
import random

import pytest

from aphoton import InvalidRequest
from aphoton_serve.hermes import ToolCall, ToolParser, call_schema, with_tools

LOOK = ToolCall(name="look", arguments='{"at": "<b>"}')
ANSWERS = {
    "no call at all": ["no call at all"],
    "": [],
    '<tool_call>\n{"name": "look", "arguments": {"at": "<b>"}}\n</tool_call>': [LOOK],
    'Well. <tool_call>{"name": "look", "arguments": {"at": "<b>"}}</tool_call>': ["Well. ", LOOK],
    '<tool_call>{"name": "look", "arguments": {"at": "<b>"}}</tool_call>\n'
    '<tool_call>{"name": "look", "arguments": {"at": "<b>"}}</tool_call>': [LOOK, LOOK],
    '<tool_call>{"name": "look", "arguments": {"at": "<b>"}}</tool_call>\nDone.': [LOOK, "Done."],
    '<tool_call>{"name": "look"}</tool_call>': [ToolCall(name="look", arguments="{}")],
    '<tool_call>{"name": "look", "arguments": {"at": "<b>"}}': [LOOK],
    "a < b <tool <tool_cal": ["a < b <tool <tool_cal"],
    "<tool_call>not json</tool_call>": ["<tool_call>not json</tool_call>"],
    '<tool_call>{"name": 7}</tool_call>!': ['<tool_call>{"name": 7}</tool_call>!'],
    '<tool_call>{"name": "x", "arguments": [1]}': ['<tool_call>{"name": "x", "arguments": [1]}'],
    '<tool_call>{"name": "x", "arguments": {"a": "\\ud83d", "b": "é"}}</tool_call>': [
        ToolCall(name="x", arguments='{"a": "\ufffd", "b": "é"}')
    ],
    '<tool_call>{"name": "\\ud83d"}</tool_call>': [ToolCall(name="\ufffd", arguments="{}")],
    '<tool_call>{"name": "x", "arguments": {"a": "\\ud83d\\ude00"}}</tool_call>': [
        ToolCall(name="x", arguments='{"a": "\U0001f600"}')
    ],
    '<tool_call>{"name": "x", "arguments": {"a": 1e999}}</tool_call>': [
        '<tool_call>{"name": "x", "arguments": {"a": 1e999}}</tool_call>'
    ],
    '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>': [
        '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>'
    ],
    "<tool_call>" + "[" * 100_000: ["<tool_call>" + "[" * 100_000],
}


def joined(said: list[str | ToolCall]) -> list[str | ToolCall]:
    """Neighbouring texts as one."""
    result: list[str | ToolCall] = []
    for item in said:
        if isinstance(item, str) and result and isinstance(result[-1], str):
            result[-1] += item
        else:
            result.append(item)
    return result


@pytest.mark.parametrize("text", ANSWERS, ids=range(len(ANSWERS)))
def test_the_same_however_it_comes(text: str) -> None:
    for seed in range(20):
        rng, parser, said, at = random.Random(seed), ToolParser(), [], 0
        while at < len(text):
            step = rng.choice([1, 2, 5, 1000]) if len(text) < 1000 else 10_000
            said += parser.push(text[at : at + step])
            at += step
        assert joined([*said, *parser.finish()]) == ANSWERS[text]


def test_text_is_told_at_once() -> None:
    parser = ToolParser()
    assert parser.push("Hello <") == ["Hello "]
    assert parser.push("b> there") == ["<b> there"]
    assert parser.push("<tool_call>{") == []


def test_a_schema_of_one_call() -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}, "in": {"anyOf": [{"$ref": "#"}]}},
        "$defs": {"Place": {"type": "string"}},
    }
    one = call_schema([{"name": "look", "parameters": parameters}])
    assert one["properties"]["name"] == {"const": "look"} and one["required"] == ["name", "arguments"]
    assert one["properties"]["arguments"]["properties"] == {
        "at": {"$ref": "#/properties/arguments/$defs/Place"},
        "in": {"anyOf": [{"$ref": "#/properties/arguments"}]},
    }
    assert parameters["properties"]["at"] == {"$ref": "#/$defs/Place"}  # type: ignore[index]
    several = call_schema([{"name": "a"}, {"name": "b", "parameters": parameters}])
    assert [option["properties"]["name"]["const"] for option in several["anyOf"]] == ["a", "b"]
    moved = several["anyOf"][1]["properties"]["arguments"]["properties"]["at"]
    assert moved == {"$ref": "#/anyOf/1/properties/arguments/$defs/Place"}


def test_what_looks_like_a_reference_in_a_literal_is_left() -> None:
    literal = {"$ref": "#/x"}
    parameters = {"$id": "https://x.example/y", "properties": {"const": {"const": literal, "enum": [literal]}}}
    arguments = call_schema([{"name": "look", "parameters": parameters}])["properties"]["arguments"]
    assert arguments == {"properties": {"const": {"const": literal, "enum": [literal]}}}
    named = call_schema([{"name": "look", "parameters": {"properties": {"const": literal}}}])
    assert named["properties"]["arguments"]["properties"]["const"] == {"$ref": "#/properties/arguments/x"}


def test_a_forced_call_has_no_tags() -> None:
    parser = ToolParser(forced=True)
    assert parser.push('{"name": "look", "arg') == parser.push('uments": {"at": "<b>"}}') == []
    assert parser.finish() == [LOOK]
    cut = ToolParser(forced=True)
    assert cut.push('{"name": "lo') == [] and cut.finish() == ['{"name": "lo']
    assert ToolParser(forced=True).finish() == []


CALLED = [
    {"role": "user", "content": "Look!"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "blue"},
]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def test_for_a_template_that_takes_tools() -> None:
    messages, tools = with_tools(CALLED, TOOLS, template_takes_them=True)
    assert tools == TOOLS
    assert messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "sky"}}
    assert messages[0] == CALLED[0] and messages[2] == CALLED[2]
    assert CALLED[1]["tool_calls"][0]["function"]["arguments"] == '{"at": "sky"}'  # type: ignore[index]


def test_for_a_template_that_does_not() -> None:
    messages, tools = with_tools(CALLED, TOOLS, template_takes_them=False)
    assert tools is None
    system, user, assistant, tool = messages
    assert system["role"] == "system" and json.dumps(TOOLS[0]) in system["content"]
    assert user == CALLED[0]
    assert assistant == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>',
    }
    assert tool == {"role": "tool", "content": "<tool_response>\nblue\n</tool_response>"}
    (only, _), _ = with_tools([{"role": "system", "content": "Be kind."}, CALLED[0]], TOOLS, template_takes_them=False)
    assert only["content"].startswith("Be kind.\n\nYou are a function calling")
    assert with_tools(CALLED[:1], None, template_takes_them=False) == (CALLED[:1], None)


def test_arguments_that_are_no_object() -> None:
    for arguments in ("[", "[]", "7", 7, None):
        call = {"function": {"name": "look", "arguments": arguments}}
        with pytest.raises(InvalidRequest, match="must be a JSON object"):
            with_tools([{"role": "assistant", "content": None, "tool_calls": [call]}], None, template_takes_them=True)
