"""From what a caller gives to a `Sequence` that fits: prompts, conversations and token ids, and their checks."""

import math
from collections.abc import Callable, Iterable, Mapping, Set
from collections.abc import Sequence as Many
from typing import Any, TypeVar, cast

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aphoton.checks import shown
from aphoton.constraints import Constraints
from aphoton.device.base import Limits
from aphoton.errors import InvalidRequest, PromptTooLong
from aphoton.sampling import RowSampling, SamplingParams
from aphoton.sampling.row import MAX_BIAS
from aphoton.scheduler import Scheduler, Sequence
from aphoton.text import ChatTemplate, Tokenizer
from aphoton.text.tokenizer import check_unicode

__all__ = [
    "Ids",
    "Prompt",
    "check_ids",
    "encode_chat",
    "encode_prompt",
    "encode_text",
    "make_sequences",
    "off_loop",
]

Prompt = str | Many[int]
Ids = NDArray[np.int32]
T = TypeVar("T")

UNSCRIPTED = "means nothing on the simulated device"
UNSCRIPTED_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "processor",
)
GOLDEN = 0x9E3779B97F4A7C15
"""Between the seeds of a request's sequences. The sampler mixes a seed before it counts, so any distance will do."""

INLINE_TEXT = 512
"""Characters of text that are tokenized on the loop: shorter than the hop to a thread and back costs."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do ``work`` in a thread, unless it is so small that the hop costs more."""
    return work() if size <= INLINE_TEXT else await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


async def encode_text(field: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """:raises InvalidRequest: for what is not text, or not Unicode."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be a string, not {type(text).__name__}")

    def encode() -> list[int]:
        check_unicode(text, field)
        return tokenizer.encode(text)

    return await off_loop(len(text), encode)


async def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> Ids:
    """:raises InvalidRequest: for what is neither text nor token ids."""
    if isinstance(prompt, str):
        return np.array(await encode_text("prompt", prompt, tokenizer), np.int32)
    return check_ids("prompt", prompt, vocab_size)


async def encode_chat(
    messages: Many[Mapping[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    tools: Many[Mapping[str, Any]] | None = None,
) -> Ids:
    """Special tokens are those that the template puts in. What names one in a message or a tool is text like any other.

    :raises InvalidRequest: for messages that the template does not take, or without one.
    """
    if template is None:
        raise InvalidRequest("messages", "this model has no chat template: use generate() or stream()")

    def encode() -> list[int]:
        text = template.render(messages, tools)
        quoted = template.render(messages, tools, quotation=tokenizer.quotation)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.quotation.same(text, quoted):
            return ids
        # A template may ask what stands in a string, and see it quoted: that is for those who need it only.
        safe, special = tokenizer.encode_quoted(quoted), tokenizer.special_ids
        return ids if [i for i in ids if i in special] == [i for i in safe if i in special] else safe

    # However short: a template is a program, and takes what time it likes.
    return np.array(await anyio.to_thread.run_sync(encode, abandon_on_cancel=True), np.int32)


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> Ids:
    """Token ids from a caller, copied.

    :raises InvalidRequest: unless they are integers in ``0..vocab_size - 1``.
    """
    refusal = InvalidRequest(field, "must be text or a list of token ids")
    if isinstance(ids, bytes | bytearray | Mapping | Set):
        raise refusal
    try:
        listed = ids if isinstance(ids, np.ndarray) else list(ids)
        given = np.asarray(listed)
    except (TypeError, ValueError):
        raise refusal from None
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise refusal
    if isinstance(listed, list) and not {bool, np.bool_}.isdisjoint(map(type, listed)):  # numpy takes True for 1
        raise refusal
    if given.size and (given.min() < 0 or given.max() >= vocab_size):
        raise InvalidRequest(field, f"token ids must be from 0 to {vocab_size - 1}")
    return given.astype(np.int32)


def make_sequences(
    prompt: Ids,
    params: SamplingParams,
    limits: Limits,
    scheduler: Scheduler,
    *,
    draw_seed: Callable[[], int],
    submitted_at: float,
    shared: bool = True,
    constraints: Constraints | None = None,
) -> list[Sequence]:
    """The ``n`` sequences of a request, which fit.

    :param draw_seed: called for a request that brings none, once it is sure to fit.
    :param shared: its pages are shared with other requests through the prefix cache; else among its own sequences.
    :param constraints: what ``params`` say of its tokens beyond single ids, compiled.
    :raises InvalidRequest: for one that never can, saying why; `PromptTooLong` when it is its length.
    """
    if not len(prompt):
        raise InvalidRequest("prompt", "must hold at least one token")
    if prompt.max() >= limits.vocab_size:  # an added token of a tokenizer that knows more than the model
        raise InvalidRequest("prompt", f"token {prompt.max()} is not one of the model's {limits.vocab_size}")
    room = limits.max_model_len - len(prompt)
    if room < (params.max_tokens != 0):
        raise PromptTooLong(
            "prompt", f"{len(prompt)} tokens leave no room for an answer: max_model_len is {limits.max_model_len}"
        )
    for token in params.stop_token_ids:
        if token >= limits.vocab_size:
            raise InvalidRequest(
                "stop_token_ids", f"{shown(token)} is not below the vocabulary size {limits.vocab_size}"
            )
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    # A grammar keeps ends back by itself, for it knows where there is nothing but the end.
    patience = min(params.min_tokens, limit)
    min_tokens = 0 if params.constrained else patience
    pages = scheduler.pages_for(len(prompt), limit)
    if pages > scheduler.pool.usable:
        raise PromptTooLong(
            "prompt",
            f"{len(prompt)} tokens and {limit} more need {pages} KV pages, and the engine has "
            f"{scheduler.pool.usable}: ask for fewer max_tokens, or raise kv_pages",
        )
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(limits.eos_token_ids))
    fields: dict[str, Any] = {
        "temperature": float(params.temperature),
        "top_k": min(params.top_k, limits.vocab_size),
        "top_p": float(params.top_p),
        "min_p": float(params.min_p),
        "min_tokens": min_tokens,
        "banned": tuple(sorted(stops)),
        "logprobs": params.logprobs,
    }
    if params.changes_logits:
        fields |= _changes(prompt, params, limits, stops, constraints)
    seed = draw_seed() if params.seed is None else params.seed
    scored = params.prompt_logprobs
    if params.echo and params.logprobs is not None:  # each output begins with those of the prompt
        scored = max(params.logprobs or 0, scored or 0)
    if scored is not None and limits.kernels == "script":
        raise InvalidRequest("echo" if params.prompt_logprobs is None else "prompt_logprobs", UNSCRIPTED)
    namespace = None if shared or params.n == 1 else object()
    return [
        Sequence(
            prompt,
            limit=limit,
            sampling=RowSampling(seed=(seed + index * GOLDEN) % 2**64, **fields),
            stop_ids=stops,
            min_tokens=min_tokens,
            submitted_at=submitted_at,
            priority=params.priority,
            masker=None if constraints is None else constraints.masker(min_tokens=patience, ends=stops),
            processor=params.processor,
            cacheable=shared or params.n > 1,
            namespace=namespace,
            prompt_logprobs=None if index else scored,  # the others have the same
        )
        for index in range(params.n)
    ]


def _changes(
    prompt: Ids, params: SamplingParams, limits: Limits, stops: frozenset[int], constraints: Constraints | None
) -> dict[str, Any]:
    """Fields of a `RowSampling` that most requests leave alone, from parameters that are checked here."""
    if limits.kernels == "script":
        for name in UNSCRIPTED_FIELDS:
            if (
                getattr(params, name)
                != SamplingParams.__struct_defaults__[SamplingParams.__struct_fields__.index(name)]
            ):
                raise InvalidRequest(name, UNSCRIPTED)
    bias = cast("tuple[tuple[int, float], ...]", params.logit_bias)
    allowed = None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
    for name, ids in (("logit_bias", [token for token, _ in bias]), ("allowed_token_ids", allowed or ())):
        if ids and ids[-1] >= limits.vocab_size:  # they are sorted
            raise InvalidRequest(name, f"{shown(ids[-1])} is not below the vocabulary size {limits.vocab_size}")
    never = () if constraints is None else constraints.banned
    if allowed is not None and params.min_tokens and not params.constrained and stops.issuperset({*allowed} - {*never}):
        raise InvalidRequest("allowed_token_ids", "must not be end tokens only, which min_tokens forbids at first")
    banned = () if constraints is None or constraints.masked else constraints.banned
    if banned and (allowed is not None or limits.kernels == "script"):  # a script has no logits
        allowed = tuple(sorted({*(range(limits.vocab_size) if allowed is None else allowed)}.difference(banned)))
    elif banned:
        bias = tuple({**dict(bias), **dict.fromkeys(banned, -math.inf)}.items())
        if len(bias) > MAX_BIAS:
            raise InvalidRequest("bad_words", f"make more than {MAX_BIAS} ids with those of logit_bias: {len(bias)}")
    repetition = float(params.repetition_penalty)
    return {
        "bias": bias,
        "allowed": None if allowed is None else np.array(allowed, np.int32),
        "presence_penalty": float(params.presence_penalty),
        "frequency_penalty": float(params.frequency_penalty),
        "repetition_penalty": repetition,
        **({"prompt": prompt} if repetition != 1.0 else {}),
    }
