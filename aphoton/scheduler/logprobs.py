"""`Logprobs`: log-probabilities, from a step's arrays to entries."""

import numpy as np
from numpy.typing import NDArray

from aphoton.completion import TokenLogprob

__all__ = ["Logprobs"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class Logprobs:
    """Those of a sequence's tokens, as they come. A tick adds arrays; who reads makes `TokenLogprob`s of them, each
    once: an entry with many alternatives takes far longer to make than to copy.
    """

    __slots__ = ("_count", "_made", "_new", "_short")

    def __init__(self) -> None:
        self._count = 0
        self._made: list[TokenLogprob] = []
        self._short: dict[int, list[TokenLogprob]] = {}
        self._new: list[tuple[list[int], list[float], Ints | None, Floats | None]] = []

    def __len__(self) -> int:
        return self._count

    def add(self, ids: list[int], values: list[float], top_ids: Ints | None, top_values: Floats | None) -> None:
        """The next tokens.

        :param top_ids, top_values: [len(ids), k] their alternatives, which are copied; None: none are asked for.
        """
        if top_ids is not None and top_values is not None:
            top_ids, top_values = top_ids.copy(), top_values.copy()
        self._new.append((ids, values, top_ids, top_values))
        self._count += len(ids)

    def read(self) -> list[TokenLogprob]:
        """All that have come; not to be changed."""
        for ids, values, top_ids, top_values in self._new:
            tops: list[tuple[tuple[int, float], ...]] = [()] * len(ids)
            if top_ids is not None and top_values is not None:
                pairs = zip(top_ids.tolist(), top_values.tolist(), strict=True)
                tops = [tuple(zip(*pair, strict=True)) for pair in pairs]
            entries = zip(ids, values, tops, strict=True)
            self._made += [TokenLogprob(token_id=token, logprob=value, top=top) for token, value, top in entries]
        self._new.clear()
        return self._made

    def read_short(self, top: int) -> list[TokenLogprob]:
        """`read`, with no more than ``top`` alternatives each."""
        made, short = self.read(), self._short.setdefault(top, [])
        short += [TokenLogprob(token_id=s.token_id, logprob=s.logprob, top=s.top[:top]) for s in made[len(short) :]]
        return short
