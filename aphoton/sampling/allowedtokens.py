"""`AllowedTokens`: the only tokens that may come."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aphoton.sampling.masker import mask_words

__all__ = ["AllowedTokens"]


class AllowedTokens:
    """A `Masker` of ids that are always the same: for a sequence that has other rules beside. (Alone, they are
    `RowSampling.allowed`.) It has no state: sequences may share one.

    :param ids: less than ``vocab_size``.
    """

    __slots__ = ("_mask",)

    cost = 1e-5

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        bits = np.zeros(32 * mask_words(vocab_size), np.bool_)
        bits[np.array(ids, np.int64)] = True
        self._mask = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """See `Masker.fill`."""
        mask[:] = self._mask

    def accept(self, token: int) -> bool:
        """See `Masker.accept`. Never the end."""
        return False
