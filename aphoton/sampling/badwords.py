"""`BadWords`: token sequences that must not come."""

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from aphoton.sampling.masker import mask_words

__all__ = ["BadWords"]

COMPARISON = 1e-8
"""Seconds that comparing an id takes."""
EACH = 50
"""Ids whose comparison takes as long as the beginning of one."""


class BadWords:
    """A `Masker`: the last id of a sequence is not allowed where the output ends with the others.

    Only the output counts, not the prompt. The same text in other tokens is another sequence: whoever bans a word gives
    all the ways to write it that matter.

    :param sequences: each of at least one id.
    :param vocab_size: of the model: ids are less than that.
    """

    __slots__ = ("_always", "_by_last", "_longest", "_tail", "cost")

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._always = all_tokens(vocab_size)
        # By the last of the tokens before: so a step looks at the sequences only that it could complete.
        self._by_last: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for sequence in sequences:
            *before, last = sequence
            if before:
                self._by_last.setdefault(before[-1], []).append((tuple(before), last))
            else:
                self._always[last // 32] &= ~np.uint32(1 << last % 32)
        self._longest = max((len(sequence) - 1 for sequence in sequences), default=0)
        self._tail: list[int] = []
        most = max((sum(len(before) + EACH for before, _ in those) for those in self._by_last.values()), default=0)
        self.cost = 1e-5 + COMPARISON * most

    def begin(self) -> "BadWords":
        """For another sequence: what was made of the words is shared."""
        begun = copy(self)
        begun._tail = []
        return begun

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """See `Masker.fill`."""
        mask[:] = self._always
        tail = tuple(self._tail)
        for before, last in self._by_last.get(tail[-1], ()) if tail else ():
            if tail[-len(before) :] == before:
                mask[last // 32] &= ~np.uint32(1 << last % 32)

    def accept(self, token: int) -> bool:
        """See `Masker.accept`. Never the end."""
        if self._longest:
            self._tail.append(token)
            if len(self._tail) > self._longest:
                del self._tail[0]
        return False


def all_tokens(vocab_size: int) -> NDArray[np.uint32]:
    """A mask that allows everything, and nothing beyond the vocabulary."""
    mask = np.full(mask_words(vocab_size), 0xFFFFFFFF, np.uint32)
    mask[-1] = (1 << vocab_size % 32) - 1
    return mask
