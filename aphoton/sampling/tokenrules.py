"""`TokenRules`: ids that may come, and runs of ids that must not."""

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aphoton.errors import AphotonError

__all__ = ["TokenRules"]


class TokenRules:
    """A `Masker` of token ids alone: a few look-ups a token, however many runs there are.

    :param allowed: the only ids that may come; None: all.
    :param forbidden: runs of ids, of which none may be completed. Each holds at least one id.
    """

    quick = True

    def __init__(self, vocab_size: int, *, allowed: Iterable[int] | None, forbidden: Iterable[tuple[int, ...]]) -> None:
        self._base = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        if allowed is not None:
            self._base[:] = 0
            for token in allowed:
                self._base[token // 32] |= np.uint32(1 << token % 32)
        # What must not follow, by what stands before it.
        self._after: dict[tuple[int, ...], list[int]] = {}
        for run in forbidden:
            if len(run) == 1:
                self._forbid(self._base, run[0])
            else:
                self._after.setdefault(run[:-1], []).append(run[-1])
        self._lengths = sorted({len(before) for before in self._after})
        self._tail: deque[int] = deque(maxlen=max(self._lengths, default=0))

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """:raises AphotonError: when no token is left."""
        mask[:] = self._base
        tail = tuple(self._tail)
        for length in self._lengths:
            if length <= len(tail):
                for token in self._after.get(tail[-length:], ()):
                    self._forbid(mask, token)
        if not mask.any():
            raise AphotonError("bad_words leave no token of those that are allowed to come next")

    def accept(self, token: int) -> bool:
        self._tail.append(token)
        return False

    @staticmethod
    def _forbid(mask: NDArray[np.uint32], token: int) -> None:
        mask[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
