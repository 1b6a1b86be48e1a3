"""`Rules`: several maskers as one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aphoton.errors import InvalidRequest
from aphoton.sampling.masker import Masker

__all__ = ["Rules"]


class Rules:
    """A `Masker`: a token may come that all of several maskers allow.

    :param maskers: at least one, of this sequence alone. The first is the one that takes long, if any does.
    :param names: the request's fields that they came from, for errors.
    """

    __slots__ = ("_names", "_others", "_scratch", "first", "quick")

    def __init__(self, maskers: Sequence[Masker], names: Sequence[str]) -> None:
        self.first, *self._others = maskers
        self._names = tuple(names)
        self._scratch: NDArray[np.uint32] | None = None
        self.quick = all(masker.quick for masker in maskers)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """See `Masker.fill`.

        :raises InvalidRequest: when no token is left that all allow.
        """
        self.first.fill(mask)
        self.narrow(mask)

    def narrow(self, mask: NDArray[np.uint32]) -> None:
        """Leave of the first one's mask what the others allow.

        :raises InvalidRequest: when that is nothing.
        """
        if self._scratch is None:
            self._scratch = np.empty_like(mask)
        for other in self._others:
            other.fill(self._scratch)
            np.bitwise_and(mask, self._scratch, out=mask)
        self.quick = self.first.quick and all(other.quick for other in self._others)
        if not mask.any():
            raise InvalidRequest(self._names[-1], f"no token is left that {' and '.join(self._names)} allow together")

    def accept(self, token: int) -> bool:
        """See `Masker.accept`. The end of one is the end of all."""
        ended = self.first.accept(token)
        for other in self._others:
            ended |= other.accept(token)
        return ended
