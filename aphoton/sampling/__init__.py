"""How a token is chosen: `SamplingParams`, `RowSampling`, and the sampler (a module of its own, for it needs torch)."""

from aphoton.sampling.masker import Masker
from aphoton.sampling.params import SamplingParams
from aphoton.sampling.processor import LogitsProcessor
from aphoton.sampling.row import RowSampling

__all__ = ["LogitsProcessor", "Masker", "RowSampling", "SamplingParams"]
