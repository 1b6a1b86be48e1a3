"""Request bodies, as OpenAI's clients send them.

A field that is null is a field that was not sent. A field that is not here is refused by name unless it is null, as
OpenAI's API does ("Unrecognized request argument"): a client that asks for what this service would not do hears of it.
``user``, ``safety_identifier``, ``metadata`` and ``prompt_cache_key`` are labels for the provider's own records: they
are taken and have no effect.
"""

from typing import Annotated, Any, Literal

import msgspec

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "Function",
    "JsonSchema",
    "NamedTool",
    "ResponseFormat",
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
    "Tool",
]

ToolName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """:ivar include_usage: end the stream with a chunk that has the usage.
    :ivar include_obfuscation: padding against observers who measure lengths: there is none here.
    """

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(_Body, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common. The last group is this project's own: see `aphoton.SamplingParams`."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None

    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema under a name. It is always held to, whatever ``strict`` says."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call; ``parameters`` is a JSON schema. A call that is forced is held to it, and no
    other, whatever ``strict`` says: that is for the template.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``/v1/chat/completions``. Messages are checked by the chat template."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``/v1/completions``. ``best_of`` must be ``n``: nobody chooses among more."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    best_of: int | None = None


class EmbeddingRequest(_Body, kw_only=True, forbid_unknown_fields=True):
    """``/v1/embeddings``."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class TokenizeRequest(_Body, kw_only=True, forbid_unknown_fields=True):
    """``/tokenize``."""

    prompt: str


class DetokenizeRequest(_Body, kw_only=True, forbid_unknown_fields=True):
    """``/detokenize``."""

    tokens: list[int]
