"""`StepInput`: what one forward reads, as tensors on the model's device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["StepInput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One launch of n rows that feed T tokens together.

    :ivar tokens: [T] int64, row by row.
    :ivar starts: [n] int32, tokens of each row whose KV is there already: a row's first new token has that position.
    :ivar lengths: [n] int32, new tokens of each row, at least 1.
    :ivar tables: [n, P] int32, page ids of each row, at least ``ceil((start + length) / page_size)`` of them and then
        padding. Page 0 is padding: it may be read and written, and what is in it means nothing.
    :ivar host_starts, host_lengths: the same on the host, for whoever plans a launch.
    """

    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    host_starts: NDArray[np.int32]
    host_lengths: NDArray[np.int32]
