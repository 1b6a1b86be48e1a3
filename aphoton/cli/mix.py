"""`mixed`: requests of all kinds and lengths, a tenth of which are given up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from aphoton import SamplingParams
from aphoton.cli.workload import Workload

__all__ = ["Ask", "Way", "mixed"]

Way = Literal["task", "aclose", "time-out"]
"""How a request is given up: its task is cancelled, its stream is closed by another task, or its time is over."""

GIVEN_UP = 0.1
AT_ONCE = 0.25
"""Of those that are given up: while they wait for a row, or at the moment when they get one."""
SAMPLED, LOGPROBS, STOPS, PATIENT = 0.4, 0.15, 0.2, 0.1
"""Shares of requests that draw their tokens, ask for log-probabilities, have end tokens of their own, and must not end
at the first ones."""
EOS = 0.3
"""Share of requests that end where the model ends; the others go on to their length, or to an end token of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    :ivar way: how it is given up; None: it is not.
    :ivar moment: when that is, 0 to 1 of the time that requests take.
    """

    prompt: list[int]
    params: SamplingParams
    way: Way | None
    moment: float


def mixed(workload: Workload, vocab_size: int) -> Iterator[Ask]:
    """Requests without end, always the same for a seed.

    :param workload: its lengths are the longest; prompts are mostly short (log-uniform), outputs of any length.
    """
    random = np.random.default_rng(workload.seed)
    while True:
        length = int(np.exp(random.uniform(0, np.log(workload.prompt_tokens + 1))))
        given_up = random.random() < GIVEN_UP
        yield Ask(
            prompt=random.integers(vocab_size, size=max(1, min(length, workload.prompt_tokens))).tolist(),
            params=_params(random, workload.output_tokens, vocab_size),
            way=get_args(Way)[random.integers(3)] if given_up else None,
            moment=0.0 if random.random() < AT_ONCE else random.random(),
        )


def _params(random: np.random.Generator, longest: int, vocab_size: int) -> SamplingParams:
    chosen: dict[str, Any] = {"max_tokens": int(random.integers(1, longest + 1)), "ignore_eos": random.random() >= EOS}
    if random.random() < SAMPLED:
        chosen["temperature"] = random.uniform(0.2, 1.5)
        if random.random() < 0.5:
            chosen["top_p"] = random.uniform(0.5, 1.0)
        if random.random() < 0.5:
            chosen["top_k"] = int(random.integers(1, 100))
        if random.random() < 0.5:
            chosen["seed"] = int(random.integers(2**62))
    if random.random() < LOGPROBS:
        chosen["logprobs"] = int(random.integers(6))
    if random.random() < STOPS:
        chosen["stop_token_ids"] = random.integers(vocab_size, size=random.integers(1, 65)).tolist()
    if random.random() < PATIENT:
        chosen["min_tokens"] = int(random.integers(1, chosen["max_tokens"] + 1))
    return SamplingParams(**chosen)
