"""`RowSampling`: the sampler state of one row."""

from dataclasses import dataclass

__all__ = ["RowSampling"]


@dataclass(slots=True, kw_only=True)
class RowSampling:
    """A row's sampler state: sent once, with the launch that first uses the row.

    :ivar row: filled in at admission.
    :ivar banned: ids that must not be sampled while fewer than ``min_tokens`` tokens have been.
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
