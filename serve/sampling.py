"""From a request's fields to `SamplingParams`."""

import re
from collections.abc import Mapping
from typing import Any

import anyio.to_thread
import msgspec

from aphoton import InvalidRequest, SamplingParams
from aphoton_serve.errors import ApiError, Problem, describe
from aphoton_serve.hermes import call_schema
from aphoton_serve.protocol_requests import ChatRequest, CompletionRequest, NamedTool, SamplingFields, Tool

__all__ = ["chat_params", "completion_params", "renamed", "wanted_tools"]

DEFAULT_MAX_TOKENS = 16
"""Of ``/v1/completions``: OpenAI's. A chat goes on to its end."""
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's; an engine's own is 0."""

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
"""As a key of ``logit_bias``: in one way only, so that none is there twice."""

SAME_NAME = (
    "top_p",
    "seed",
    "stop",
    "min_tokens",
    "top_k",
    "min_p",
    "stop_token_ids",
    "regex",
    "choices",
    "grammar",
    "allowed_token_ids",
    "bad_words",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "include_stop_str_in_output",
    "ignore_eos",
    "echo",
)


def completion_params(body: CompletionRequest) -> SamplingParams:
    """:raises ApiError: 400, for what cannot be."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of must be n: nobody chooses among more", param="best_of", code="unsupported_value")
    fields = _common(body)
    fields["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    fields["logprobs"] = body.logprobs
    return _build(fields, {})


async def chat_params(body: ChatRequest) -> tuple[SamplingParams, dict[str, str]]:
    """The parameters, and what the client calls those that have another name there.

    In a thread where there is a schema: it is copied and checked, which takes milliseconds for a large one, and its
    compiler has a thread's hop before it anyway.

    :raises ApiError: 400, for what cannot be.
    """
    if body.response_format is None and body.tool_choice is None:
        return _chat_params(body)
    return await anyio.to_thread.run_sync(_chat_params, body, abandon_on_cancel=True)


def _chat_params(body: ChatRequest) -> tuple[SamplingParams, dict[str, str]]:
    fields, names = _common(body), {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        names["max_tokens"] = "max_completion_tokens"
        fields["max_tokens"] = body.max_completion_tokens
    else:
        fields["max_tokens"] = body.max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    _add_format(body, fields, names)
    _add_forced_call(body, fields, names)
    return _build(fields, names), names


def wanted_tools(body: ChatRequest) -> list[Tool]:
    """The tools that the model may call in its answer."""
    return [] if body.tool_choice == "none" else body.tools or []


def _common(body: SamplingFields) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options", code="invalid_value")
    fields: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAME if hasattr(body, name)}
    fields["temperature"] = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    if body.logit_bias:
        if not all(map(TOKEN_ID.fullmatch, body.logit_bias)):
            raise ApiError(400, "its keys must be token ids", param="logit_bias", code="invalid_value")
        fields["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    return fields


def _add_format(body: ChatRequest, fields: dict[str, Any], names: dict[str, str]) -> None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return
    if wanted_tools(body):
        raise ApiError(
            400,
            f"a response_format of {wanted.type} leaves no room for tool calls: give one of them",
            param="response_format",
            code="unsupported_value",
        )
    if wanted.type == "json_object":
        fields["json_object"] = True
        names["json_object"] = "response_format"
        return
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise ApiError(
            400,
            "Missing required argument: response_format.json_schema.schema",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    fields["json_schema"] = wanted.json_schema.schema
    names["json_schema"] = "response_format"


def _add_forced_call(body: ChatRequest, fields: dict[str, Any], names: dict[str, str]) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    if not body.tools:
        if choice == "none":
            return
        raise ApiError(400, "tool_choice needs tools", param="tool_choice", code="invalid_value")
    functions = [tool.function for tool in body.tools]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            raise ApiError(
                400, f"no tool is named {choice.function.name!r:.100}", param="tool_choice", code="invalid_value"
            )
    elif choice != "required":
        return
    fields["json_schema"] = call_schema([{"name": f.name, "parameters": f.parameters} for f in functions])
    names["json_schema"] = "tool_choice"


def _build(fields: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """:param names: what the client calls a field that has another name there."""
    asked = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
    try:
        return SamplingParams(**asked)
    except InvalidRequest as error:
        raise ApiError.of(renamed(describe(error), names)) from None


def renamed(problem: Problem, names: Mapping[str, str]) -> Problem:
    """A problem of the engine's, in the client's words."""
    called = names.get(problem.param or "")
    if called is None:
        return problem
    message = problem.message.removeprefix(f"{problem.param}: ")
    return msgspec.structs.replace(problem, param=called, message=f"{called}: {message}")
