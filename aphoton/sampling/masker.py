"""`Masker`: which tokens may come next, as the host knows it."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Masker"]


class Masker(Protocol):
    """The state of one sequence that has rules: a grammar, words that must not come. Not for two threads at once."""

    quick: bool
    """Whether `fill` is known to take less than a turn of the event loop may: it is called on the loop then."""

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask of the next token: bit t % 32 of word t // 32 says that token t may come.

        :param mask: [ceil(vocab_size / 32)], contiguous; what is in it means nothing.
        :raises Exception: when no mask can be made any more: that ends the sequence, with this error.
        """

    def accept(self, token: int) -> bool:
        """Go on by a token, which the last mask allowed. Returns whether nothing may follow it: the sequence ends."""
