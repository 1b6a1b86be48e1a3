"""`AllowedTokens`: the only tokens that may come."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["AllowedTokens"]


class AllowedTokens:
    """A `Masker` of ids that are always the same: for a sequence that has other rules beside. (Alone, they are
    `RowSampling.allowed`.)

    :param ids: less than ``vocab_size``.
    """

    __slots__ = ("_mask", "quick")

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self.quick = True
        self._mask = np.zeros((vocab_size + 31) // 32, np.uint32)
        for i in ids:
            self._mask[i // 32] |= np.uint32(1 << i % 32)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """See `Masker.fill`."""
        mask[:] = self._mask

    def accept(self, token: int) -> bool:
        """See `Masker.accept`. Never the end."""
        return False
