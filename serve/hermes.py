"""Tool calls in the form that Hermes, Qwen and SmolLM2 models write: ``<tool_call>{"name": ..., "arguments": ...}
</tool_call>``."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from aphoton.errors import InvalidRequest

__all__ = ["ToolCall", "ToolParser", "call_schema", "with_tools"]

BEGIN, END = "<tool_call>", "</tool_call>"

NAMES = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
LITERALS = ("const", "default", "enum", "examples")
"""Keywords of JSON Schema whose keys are names, and whose values are no schemas."""

INSTRUCTIONS = """\
You are a function calling AI model. You may call one or more functions to assist with the user query. The signatures \
of the functions are within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call return a JSON object with the function's name and its arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""
"""What a template that knows no tools is given as a system message: the wording of NousResearch's
Hermes-Function-Calling, which models of this form were trained on."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a model wants made. ``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


class ToolParser:
    """Finds the calls in an answer as it comes. Text around them stays text.

    Holds back what may still become a tag, and a call until it is whole. What stands between tags and is no call is
    text, tags included: the client sees what the model said.
    """

    def __init__(self, *, forced: bool = False) -> None:
        """:param forced: the answer is one call and nothing else, without tags: see `call_schema`."""
        self._forced = forced
        self._held = ""
        self._scanned = 0  # of what is held within a call: no end tag begins before
        self._inside = False
        self._called = False  # white space between calls is nobody's text

    def push(self, text: str) -> list[str | ToolCall]:
        """What can be told, in order."""
        self._held += text
        if self._forced:
            return []
        found: list[str | ToolCall] = []
        while True:
            if self._inside:
                at = self._held.find(END, self._scanned)
                if at < 0:
                    self._scanned = max(0, len(self._held) - len(END) + 1)
                    return found
                inside, self._held = self._held[:at], self._held[at + len(END) :]
                self._inside, self._scanned = False, 0
                call = _read_call(inside)
                if call is None:
                    found.append(f"{BEGIN}{inside}{END}")
                else:
                    self._called = True
                    found.append(call)
                continue
            if self._called:
                self._held = self._held.lstrip()
            at = self._held.find(BEGIN)
            if at < 0:
                keep = _overlap(self._held, BEGIN)
                shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                if shown:
                    self._called = False
                    found.append(shown)
                return found
            if at:
                found.append(self._held[:at])
            self._held, self._inside, self._scanned = self._held[at + len(BEGIN) :], True, 0

    def finish(self) -> list[str | ToolCall]:
        """What is left at the end of the answer. Some models leave the last end tag out."""
        if self._forced:
            call = _read_call(self._held)
            return [self._held if call is None else call] if self._held else []
        if not self._inside:
            held, self._held = self._held, ""
            return [held] if held else []
        call = _read_call(self._held)
        text, self._held, self._inside = BEGIN + self._held, "", False
        return [text if call is None else call]


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def _read_call(text: str) -> ToolCall | None:
    """None for what is none, and for numbers that are none in JSON or that Python takes for infinite."""
    try:
        call = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    name, written = _whole(call["name"]), _whole(json.dumps(arguments, ensure_ascii=False))
    return ToolCall(name=name, arguments=written)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _whole(text: str) -> str:
    """With U+FFFD for half a character, which JSON can escape and no message can have."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A JSON schema of what stands between the tags of one call of one of ``functions``.

    :param functions: each with a ``name`` and, maybe, ``parameters``: a JSON schema.
    """

    def call(function: Mapping[str, Any], place: str) -> dict[str, Any]:
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        parameters.pop("$id", None)  # it is a part now, and nobody refers to it by that
        return {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": _moved(parameters, f"{place}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }

    if len(functions) == 1:
        return call(functions[0], "#")
    return {"anyOf": [call(function, f"#/anyOf/{i}") for i, function in enumerate(functions)]}


def _moved(schema: Any, place: str) -> Any:
    """A schema as a part of another, at ``place``: its references to itself go there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in NAMES and isinstance(value, dict):
            moved[key] = {name: _moved(part, place) for name, part in value.items()}
        else:
            moved[key] = value if key in LITERALS else _moved(value, place)
    ref = moved.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        moved["$ref"] = place + ref[1:]
    return moved


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, template_takes_them: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as a chat template takes them.

    A template that takes tools gets them, and calls of earlier turns with their arguments as objects, as these
    templates are written. For any other one tools become a system message, and calls and results of earlier turns
    become text.

    :raises InvalidRequest: for a call whose arguments are no JSON object.
    """
    read = [_with_objects(f"messages[{i}]", message) for i, message in enumerate(messages)]
    if template_takes_them:
        return read, [dict(tool) for tool in tools] if tools else None
    plain = [_as_text(message) for message in read]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        plain = _with_system(plain, INSTRUCTIONS.format(tools=listed))
    return plain, None


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first = messages[0] if messages else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_objects(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """The calls of an assistant's message with their arguments as objects."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    if message.get("role") != "assistant" or not isinstance(calls, list):
        raise InvalidRequest(f"{field}.tool_calls", "must be a list, in an assistant's message")
    read = []
    for i, call in enumerate(calls):
        where = f"{field}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(where, "must have a function with a name and arguments")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise InvalidRequest(f"{where}.function.arguments", "must be a JSON object, as text") from None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{where}.function.arguments", "must be a JSON object, as text")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": read}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """For a template that knows nothing of tools."""
    content = message.get("content")
    if message.get("role") == "tool" and isinstance(content, str):
        return {"role": "tool", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{BEGIN}\n{_written(call['function'])}\n{END}" for call in calls]
    texts = [content, *written] if isinstance(content, str) and content else written
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": "\n".join(texts)}


def _written(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
