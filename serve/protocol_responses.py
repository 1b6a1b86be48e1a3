"""Response bodies, as OpenAI's clients read them."""

from typing import Any, Literal

import msgspec

from aphoton import Usage as Counts

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatMessage",
    "ChunkCall",
    "Delta",
    "Finish",
    "FunctionCall",
    "Model",
    "ModelList",
    "TextChoice",
    "TextCompletion",
    "TextLogprobs",
    "TokenScore",
    "ToolCallOut",
    "TopScore",
    "Usage",
    "encode",
    "usage_of",
]

Finish = Literal["stop", "length", "tool_calls"]


class PromptDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of(counts: list[Counts]) -> Usage:
    """The sum of several jobs'."""
    prompt, completion = sum(c.prompt_tokens for c in counts), sum(c.completion_tokens for c in counts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(c.cached_tokens for c in counts)),
    )


class TopScore(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenScore(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopScore]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenScore]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCallOut(msgspec.Struct, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    content: str | None
    tool_calls: list[ToolCallOut] | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    finish_reason: Finish
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChunkCall(ToolCallOut, kw_only=True):
    index: int


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ChunkCall] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    finish_reason: Finish | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class TextLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: Finish | None = None
    logprobs: TextLogprobs | None = None


class TextCompletion(msgspec.Struct, kw_only=True):
    """Whole, or a chunk of a stream: they have the same form."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, kw_only=True):
    """:ivar max_model_len: tokens of prompt and answer; not in OpenAI's API.
    :ivar can_chat: whether ``/v1/chat/completions`` takes it; not in OpenAI's API.
    """

    id: str
    created: int
    max_model_len: int
    can_chat: bool
    object: Literal["model"] = "model"
    owned_by: str = "aphoton"


class ModelList(msgspec.Struct, kw_only=True):
    data: list[Model]
    object: Literal["list"] = "list"


def encode(body: Any) -> bytes:
    """As JSON."""
    return _encoder.encode(body)


_encoder = msgspec.json.Encoder()
