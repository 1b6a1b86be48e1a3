"""`RowSampling`: the sampler state of one row."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_BIAS", "RowSampling"]

MAX_BIAS = 1024
"""Entries of a row's ``bias``: devices have room for so many, from the start."""


@dataclass(slots=True, kw_only=True)
class RowSampling:
    """A row's sampler state: sent once, with the launch that first uses the row.

    The order is: bias, penalties (repetition, then frequency and presence), processors, masks and bans, temperature,
    top-k, top-p, min-p. Log-probabilities are of the logits before all of these.

    :ivar row: filled in at admission.
    :ivar banned: ids that must not be sampled while fewer than ``min_tokens`` tokens have been.
    :ivar bias: (id, value) added to logits, at most `MAX_BIAS` of them, each id once.
    :ivar allowed: the only ids that may be sampled, which sequences of a request share; None: all.
    :ivar repetition_penalty: logits of tokens of prompt and output are divided by it where positive, multiplied where
        negative (arXiv:1909.05858, Hugging Face). 1: none.
    :ivar presence_penalty, frequency_penalty: subtracted once, and once for each time, from logits of tokens of the
        output (OpenAI's API reference).
    :ivar prompt: [p] int32, of a row with a repetition penalty; else empty.
    :ivar output: tokens sampled before the row was given to its sequence (it was preempted), of a row with any penalty;
        filled in at admission.
    """

    seed: int
    row: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    banned: tuple[int, ...] = ()
    logprobs: int | None = None
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | NDArray[np.int32] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    output: tuple[int, ...] = ()

    @property
    def penalized(self) -> bool:
        """Whether any penalty is asked for."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def ruled(self) -> bool:
        """Whether anything changes the logits from the first token on: bias, allowed ids or a penalty."""
        return bool(self.bias) or self.allowed is not None or self.penalized
