"""From checked token ids and parameters to a request's `Sequence`s that fit."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from aphoton.checks import shown
from aphoton.constraints import Constraints
from aphoton.device.base import Limits
from aphoton.errors import InvalidRequest, PromptTooLong
from aphoton.sampling import RowSampling, SamplingParams
from aphoton.sampling.row import MAX_BIAS
from aphoton.scheduler import Scheduler, Sequence

__all__ = ["make_sequences"]

Ids = NDArray[np.int32]

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
