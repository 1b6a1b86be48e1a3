"""`BothMaskers`: what two maskers allow."""

import numpy as np
from numpy.typing import NDArray

from aphoton.errors import AphotonError
from aphoton.sampling.masker import Masker

__all__ = ["BothMaskers"]


class BothMaskers:
    """A `Masker` of the tokens that both of two others allow, which ends when one of them does."""

    def __init__(self, one: Masker, other: Masker) -> None:
        self.quick = one.quick and other.quick
        self._one = one
        self._other = other
        self._scratch = np.zeros(0, np.uint32)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """:raises AphotonError: when there is no such token."""
        if len(self._scratch) != len(mask):
            self._scratch = np.zeros_like(mask)
        self._one.fill(mask)
        self._other.fill(self._scratch)
        mask &= self._scratch
        if not mask.any():
            raise AphotonError("allowed_token_ids and bad_words leave no token of those that the grammar wants next")

    def accept(self, token: int) -> bool:
        ends = [masker.accept(token) for masker in (self._one, self._other)]
        return any(ends)
