"""`Masker`: which tokens may come next, as the host knows it, and `mask_words`: how that is written."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Masker", "mask_words"]


def mask_words(vocab_size: int) -> int:
    """uint32 words of a mask. They have a bit more than there are tokens, at least.

    llguidance has an end token behind the model's where that has none, and all masks are of one size.
    """
    return vocab_size // 32 + 1


class Masker(Protocol):
    """The state of one sequence that has rules: a grammar, words that must not come. Not for two threads at once."""

    @property
    def cost(self) -> float:
        """Seconds that `fill` will take, about, by what is known of it."""

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask of the next token: bit t % 32 of word t // 32 says that token t may come.

        :param mask: [mask_words], contiguous; what is in it means nothing. Bits behind the vocabulary are to be 0.
        :raises Exception: when no mask can be made any more: that ends the sequence, with this error.
        """

    def accept(self, token: int) -> bool:
        """Go on by a token, which the last mask allowed. Returns whether nothing may follow it: the sequence ends."""
