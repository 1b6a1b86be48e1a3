"""What a request gives back: `Completion`, and the `Piece`s of a stream."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

__all__ = ["Completion", "FinishReason", "Output", "Piece", "Timings", "TokenLogprob", "Usage"]

FinishReason = Literal["stop", "length", "abort"]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability (natural logarithm, of the model's distribution before temperature and filters) of one token.

    :ivar top: the likeliest tokens at this position with theirs, best first; as many as ``logprobs`` asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request: those of its prompt, once, and those sampled for all of its outputs.

    :ivar cached_tokens: those of the prompt whose KV was there already.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, from the moment the request was submitted.

    :ivar queued: until it got a row.
    :ivar ttft: until its first token, of whichever output, was on the host. None when it ended without one.
    :ivar total: until its end.
    :ivar itl: mean time between two tokens of an output. None with fewer than two.
    """

    queued: float
    ttft: float | None
    total: float
    itl: float | None


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One returned sequence.

    :ivar finish_reason: ``"stop"`` (an end token or a stop string), ``"length"`` (``max_tokens`` or the model's
        length), or ``"abort"`` (the request was cancelled; what had come by then is here).
    :ivar stop_reason: the stop string or the token id that ended it; None for other ends.
    :ivar logprobs: one entry per token id, when the request asked for them; None for the first of an echoed prompt.
    :ivar parsing: makes what `parsed` is, of an output with a grammar that was not cut short.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    parsing: Callable[[], Any] | None = None

    @property
    def parsed(self) -> Any:
        """The object that the text stands for: of a ``json_schema`` that is a type, one of these; of another or a
        ``json_object``, what JSON makes; of other grammars, the text itself. None without a grammar, and for a text
        that was cut by its length, a stop string or an abort. Made anew each time.

        :raises ValueError: when the type refuses what its schema allows, as a validator of its own may.
        """
        return None if self.parsing is None else self.parsing()


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request. ``text``, ``token_ids``, ``finish_reason``, ``logprobs`` and ``parsed`` are those of
    ``outputs[0]``.

    :ivar outputs: ``n``, in the order of their indices.
    :ivar prompt_logprobs: one entry per token of the prompt, when the request asked for them; None for the first, which
        nothing comes before.
    """

    outputs: tuple[Output, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def parsed(self) -> Any:
        return self.outputs[0].parsed

    @property
    def logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        return self.outputs[0].logprobs


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of one output since its last piece. The last one carries its ``finish_reason``.

    ``text`` may lag behind ``token_ids``: a character that is not complete yet, or text that may still become a stop
    string, comes with a later piece. The texts of an output's pieces joined are the output's text.

    :ivar index: of the output.
    :ivar prompt_logprobs: in the first piece of the first output; see `Completion`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
