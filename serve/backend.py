"""`Backend`: what stands behind the HTTP service: engines in this process, or deployments somewhere else."""

from collections.abc import Sequence
from typing import Any, Protocol, Self

import msgspec

from aphoton import FinishReason, SamplingParams, Usage
from aphoton_serve.errors import ApiError

__all__ = [
    "Answer",
    "Backend",
    "Choice",
    "Family",
    "Job",
    "ModelCard",
    "Part",
    "PartStream",
    "Score",
    "Ticks",
    "unknown_model",
]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the service offers it.

    :ivar created: when it was loaded, in seconds since 1970.
    :ivar can_chat: whether it has a chat template.
    """

    id: str
    created: int
    max_model_len: int
    can_chat: bool


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a model: a prompt (text or token ids), or messages with the tools that the model may call.

    :ivar adapter: of the model, by name. No engine takes any yet, so it is empty.
    :ivar trace: headers that say which trace it belongs to.
    """

    params: SamplingParams
    adapter: str = ""
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    trace: dict[str, str] | None = None


class Score(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability, and the likeliest at its place. Tokens as bytes: one may be part of a character."""

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of one answer since its last part. A stream's last part has the ``usage``, and nothing else."""

    index: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    scores: tuple[Score, ...] | None = None
    usage: Usage | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer."""

    index: int
    text: str
    finish_reason: FinishReason
    scores: tuple[Score, ...] | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """All answers to a job, in order."""

    choices: tuple[Choice, ...]
    usage: Usage


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric: its samples as (name, labels, value)."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


class Ticks(msgspec.Struct, frozen=True, kw_only=True):
    """The newest spans of an engine's timeline as (phase, step, begin, end, rows, tokens).

    Times in seconds, of a clock of the engine's own.
    """

    spans: list[tuple[str, int, float, float, int, int]]
    tokens: int


class PartStream(Protocol):
    """An iterator of parts. The job begins with its first step, and ends early when it is closed or cancelled."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Part: ...

    async def aclose(self) -> None: ...


class Backend(Protocol):
    """Models by name. A call that waits is cancelled when nobody waits any more; the job ends then.

    Every call raises what `aphoton_serve.errors.describe` knows, and `ApiError` 404 for a model that is not there.
    """

    @property
    def names(self) -> Sequence[str]:
        """Of all models, in a fixed order."""

    async def card(self, model: str) -> ModelCard:
        """What a model is."""

    def stream(self, model: str, job: Job) -> PartStream:
        """The answers to a job, part by part."""

    async def complete(self, model: str, job: Job) -> Answer:
        """The answers to a job, when all have ended."""

    async def tokenize(self, model: str, text: str) -> list[int]:
        """The token ids of ``text`` as a prompt."""

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """The text of ``ids``."""

    async def health(self) -> dict[str, str | None]:
        """What is wrong with each model's engine; None when nothing is."""

    async def metrics(self) -> list[Family]:
        """What to show to Prometheus."""

    async def ticks(self, model: str) -> Ticks:
        """What the engine has done lately."""


def unknown_model(model: str) -> ApiError:
    """For a model that is not there."""
    return ApiError(404, f"the model {model!r:.200} does not exist", param="model", code="model_not_found")
