"""`SamplingParams`: what a request may ask of its tokens, checked when it is made."""

import inspect
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_not
from typing import Any, get_origin

import msgspec

from aphoton.checks import check_float, check_int, shown
from aphoton.errors import InvalidRequest
from aphoton.sampling.processor import LogitsProcessor
from aphoton.sampling.row import MAX_BIAS
from aphoton.sampling.schema import Schema, is_larger, schema_text

__all__ = ["SamplingParams"]

MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_N = 64
MAX_BAD_WORDS = 256
MAX_CHOICES = 4096
MAX_ALLOWED = 1 << 20
"""Ids of ``allowed_token_ids``: more than any vocabulary has."""
MAX_GRAMMAR = 1 << 18
"""Characters of a regex, of a grammar, of all choices together, or of a schema as JSON."""
MAX_DEADLINE = 1e9
MIN_REPETITION = 0.01
"""What logits divided by it do not overflow at."""
GRAMMARS = ("json_schema", "json_object", "regex", "choices", "grammar")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose a request's tokens, and when to end.

    The order is that of Hugging Face's processors: bias, penalties, what may be sampled at all (`processor`, grammar,
    ``allowed_token_ids``, ``bad_words``), temperature, top-k, top-p, min-p, then one draw.

    Of ``json_schema``, ``json_object``, ``regex``, ``choices`` and ``grammar`` a request has at most one. Parameters
    are hashable unless ``json_schema`` is a dictionary.

    :ivar max_tokens: tokens to generate at most. None: until the model's length. 0: none, which leaves
        what is said of the prompt.
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
    :ivar prompt_logprobs: the same of each token of the prompt, given those before it.
    :ivar echo: put the prompt before the output: its text, its token ids and, with ``logprobs``, theirs, of which the
        first is None.
    :ivar n: outputs for the one prompt, each with a random stream of its own; the first one's is that of n = 1.
    :ivar presence_penalty: subtracted from the logits of tokens that the output has already.
    :ivar frequency_penalty: the same for each time that it has them.
    :ivar repetition_penalty: divides positive logits of tokens that prompt or output have already, and multiplies
        negative ones (arXiv:1909.05858). 1: none.
    :ivar logit_bias: added to the logits of token ids. Kept as pairs (id, value).
    :ivar allowed_token_ids: the only ids that may be sampled. None: all.
    :ivar bad_words: texts that must not come, each as the tokens that make it up, with a space before it and without.
    :ivar processor: changes the logits of each token on the device; see `LogitsProcessor`.
    :ivar json_schema: the output is JSON of this schema: a dictionary, or a msgspec struct, a dataclass or a pydantic
        model, of which ``completion.parsed`` is an object then.
    :ivar json_object: the output is a JSON object.
    :ivar regex: the output matches this regular expression as a whole.
    :ivar choices: the output is one of these texts.
    :ivar grammar: the output is of this grammar, in Lark's notation.
    :ivar priority: lower goes first; among equals, whoever came first.
    :ivar deadline: seconds, from when it is submitted, after which the request ends with `DeadlineExceeded`, wherever
        it is by then. None: never.
    :ivar use_prefix_cache: take what is known of the prompt from the prefix cache, and leave it there for others. None:
        as the engine is configured.
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
    prompt_logprobs: int | None = None
    echo: bool = False
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    processor: LogitsProcessor | None = None
    json_schema: Any = None
    json_object: bool = False
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    priority: int = 0
    deadline: float | None = None
    use_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 0)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most, least = shown(self.max_tokens), shown(self.min_tokens)
            raise InvalidRequest("min_tokens", f"must be at most max_tokens ({most}), not {least}")
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, 0)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.stop, str | tuple | list):
            raise InvalidRequest("stop", f"must be a string or a list of strings, not {shown(self.stop)}")
        stops = self.stop_strings
        if len(stops) > MAX_STOPS:
            raise InvalidRequest("stop", f"must be at most {MAX_STOPS} strings, not {len(stops)}")
        for stop in stops:
            _check_text("stop", stop, MAX_STOP_LENGTH)
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequest("stop_token_ids", f"must be a list of token ids, not {shown(self.stop_token_ids)}")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidRequest("stop_token_ids", f"must be at most {MAX_STOPS} ids, not {len(self.stop_token_ids)}")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0)
        # The caller's own lists may change after they have been checked.
        msgspec.structs.force_setattr(self, "stop", stops)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequest(name, f"must be true or false, not {shown(getattr(self, name))}")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        # Most requests have none of these, and there are many of both: by identity, so that False is not taken for 0.
        if any(map(is_not, _rarely(self), _DEFAULTS)):
            self._check_rare()

    def _check_rare(self) -> None:
        """The fields that most requests leave alone."""
        for name in ("echo", "json_object"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequest(name, f"must be true or false, not {shown(getattr(self, name))}")
        if self.use_prefix_cache is not None and type(self.use_prefix_cache) is not bool:
            raise InvalidRequest("use_prefix_cache", f"must be true, false or None, not {shown(self.use_prefix_cache)}")
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        check_int("n", self.n, 1, MAX_N)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION, 10.0)
        check_int("priority", self.priority, -(2**31), 2**31 - 1)
        if self.deadline is not None:
            check_float("deadline", self.deadline, 0.0, MAX_DEADLINE, open_low=True)
        if self.processor is not None:
            _check_processor(self.processor)
        copied = msgspec.structs.force_setattr
        copied(self, "logit_bias", _biases(self.logit_bias))
        copied(self, "bad_words", _texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_LENGTH))
        if self.allowed_token_ids is not None:
            copied(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        if len(given := self._grammars()) > 1:
            raise InvalidRequest(given[1], f"give one of {', '.join(GRAMMARS)}, not {' and '.join(given)}")
        if self.json_schema is not None:
            copied(self, "json_schema", _schema(self.json_schema))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), MAX_GRAMMAR)
        if self.choices is not None:
            copied(self, "choices", _texts("choices", self.choices, MAX_CHOICES, MAX_GRAMMAR))
            if not self.choices:
                raise InvalidRequest("choices", "must hold at least one text")
            if sum(map(len, self.choices)) > MAX_GRAMMAR:
                raise InvalidRequest("choices", f"must be at most {MAX_GRAMMAR} characters together")

    def _grammars(self) -> list[str]:
        """Those of `GRAMMARS` that are given."""
        return [name for name in GRAMMARS if getattr(self, name) is not None and getattr(self, name) is not False]

    @property
    def constrained(self) -> bool:
        """Whether the output is of some grammar."""
        return (
            self.json_schema is not None
            or self.json_object
            or self.regex is not None
            or self.choices is not None
            or self.grammar is not None
        )

    @property
    def has_rules(self) -> bool:
        """Whether the host says, token by token, what may be sampled."""
        return bool(self.bad_words) or self.constrained

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before temperature and filters, by the device or by a function of the caller's."""
        return (
            self.processor is not None
            or self.allowed_token_ids is not None
            or bool(self.logit_bias or self.bad_words or self.presence_penalty or self.frequency_penalty)
            or self.repetition_penalty != 1.0
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whichever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_RARE = SamplingParams.__struct_fields__[SamplingParams.__struct_fields__.index("prompt_logprobs") :]
_rarely = attrgetter(*_RARE)
_DEFAULTS = SamplingParams.__struct_defaults__[-len(_RARE) :]


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    """``logit_bias`` as pairs, in the order of ids."""
    if isinstance(given, Mapping):
        given = tuple(given.items())
    if not isinstance(given, tuple | list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        raise InvalidRequest("logit_bias", f"must be a mapping from token ids to numbers, not {shown(given)}")
    if len(given) > MAX_BIAS:
        raise InvalidRequest("logit_bias", f"must be of at most {MAX_BIAS} ids, not {len(given)}")
    for token, value in given:
        check_int("logit_bias", token, 0)
        check_float("logit_bias", value, -100.0, 100.0)
    biases = {token: float(value) for token, value in given}
    if len(biases) < len(given):
        raise InvalidRequest("logit_bias", "must have each id once")
    return tuple(sorted(biases.items()))


def _allowed(given: object) -> tuple[int, ...]:
    if not isinstance(given, tuple | list):
        raise InvalidRequest("allowed_token_ids", f"must be a list of token ids, not {shown(given)}")
    if not given:
        raise InvalidRequest("allowed_token_ids", "must hold at least one id")
    if len(given) > MAX_ALLOWED:
        raise InvalidRequest("allowed_token_ids", f"must be at most {MAX_ALLOWED} ids, not {len(given)}")
    if set(map(type, given)) != {int} or min(given) < 0:
        for token in given:  # whichever it is
            check_int("allowed_token_ids", token, 0)
    return tuple(sorted(set(given)))


def _check_processor(given: Any) -> None:
    wrong = not callable(given)
    if not wrong:
        # What it returns would never be awaited.
        for call in (given, getattr(given, "__call__", None)):  # noqa: B004
            wrong |= inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call)
        try:
            signature = inspect.signature(given)
        except (TypeError, ValueError):  # of some that are written in C
            signature = None
        try:
            if signature is not None:
                signature.bind(None, None)
        except TypeError:
            wrong = True
    if wrong:
        raise InvalidRequest(
            "processor", f"must be a function, not async, that takes output and logits, not {shown(given)}"
        )


def _texts(field: str, given: object, most: int, longest: int) -> tuple[str, ...]:
    if not isinstance(given, tuple | list):
        raise InvalidRequest(field, f"must be a list of strings, not {shown(given)}")
    if len(given) > most:
        raise InvalidRequest(field, f"must be at most {most} strings, not {len(given)}")
    for text in given:
        _check_text(field, text, longest)
    return tuple(given)


def _check_text(field: str, text: object, longest: int) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be a string, not {shown(text)}")
    if not text:
        raise InvalidRequest(field, "must not be empty")
    if len(text) > longest:
        raise InvalidRequest(field, f"must be at most {longest} characters, not {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "is not Unicode text: a lone surrogate") from None


def _schema(given: object) -> Any:
    """A schema, copied unless it is a type."""
    if isinstance(given, Schema | type) or get_origin(given) is not None:
        return given
    if not isinstance(given, dict):
        raise InvalidRequest(
            "json_schema",
            f"must be a dictionary, or a struct, dataclass or pydantic model, not {shown(given)}",
        )
    if is_larger(given, MAX_GRAMMAR):  # found before it is all written
        raise InvalidRequest("json_schema", f"must be at most {MAX_GRAMMAR} bytes as JSON")
    text = schema_text(given)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("json_schema", "is not Unicode text: a lone surrogate") from None
    if size > MAX_GRAMMAR:
        raise InvalidRequest("json_schema", f"must be at most {MAX_GRAMMAR} bytes as JSON, not {size}")
    return Schema(text)
