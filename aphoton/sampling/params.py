"""`SamplingParams`: what a request may ask of its tokens, checked when it is made."""

from collections.abc import Sequence

import msgspec

from aphoton.checks import check_float, check_int
from aphoton.errors import InvalidRequest

__all__ = ["SamplingParams"]

MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose a request's tokens, and when to end.

    The order is that of Hugging Face's processors: temperature, top-k, top-p, min-p, then one draw.

    :ivar max_tokens: tokens to generate at most. None: until the model's length.
    :ivar min_tokens: no end token and no stop string counts before this many tokens.
    :ivar temperature: 0 is greedy.
    :ivar top_k: keep the k likeliest tokens. 0: all.
    :ivar top_p: keep the fewest likeliest tokens whose probabilities reach p (nucleus sampling, arXiv:1904.09751).
    :ivar min_p: drop tokens less likely than min_p times the likeliest (arXiv:2407.01082). 0: none.
    :ivar seed: of this request's own random stream. Its numbers depend on nothing else, whoever shares the batch.
        None: one is drawn from the engine's seed.
    :ivar stop: strings that end the text; not part of it unless ``include_stop_str_in_output``.
    :ivar stop_token_ids: further end tokens. An end token is part of ``token_ids``, never of the text.
    :ivar ignore_eos: go on past the model's own end tokens.
    :ivar logprobs: report the chosen token's log-probability, and as many alternatives; 0: the chosen token's only.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}")
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, 0)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.stop, str | tuple | list):
            raise InvalidRequest("stop", f"must be a string or a list of strings, not {self.stop!r}")
        stops = self.stop_strings
        if len(stops) > MAX_STOPS:
            raise InvalidRequest("stop", f"must be at most {MAX_STOPS} strings, not {len(stops)}")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidRequest("stop", "must be strings that are not empty")
        if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise InvalidRequest("stop", f"must be strings of at most {MAX_STOP_LENGTH} characters")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequest("stop_token_ids", f"must be a list of token ids, not {self.stop_token_ids!r}")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidRequest("stop_token_ids", f"must be at most {MAX_STOPS} ids, not {len(self.stop_token_ids)}")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0)
        # The caller's own lists may change after they have been checked.
        msgspec.structs.force_setattr(self, "stop", stops)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequest(name, f"must be true or false, not {getattr(self, name)!r}")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whichever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
