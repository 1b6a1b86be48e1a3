"""How a token is chosen: `SamplingParams`, `RowSampling`, and the sampler (a module of its own, for it needs torch)."""

from aphoton.sampling.params import SamplingParams
from aphoton.sampling.row import RowSampling

__all__ = ["RowSampling", "SamplingParams"]
