"""`Penalties`: what a row's tokens so far do to its logits, on the CPU."""

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from aphoton.sampling.row import RowSampling

__all__ = ["Penalties"]


class Penalties:
    """The penalties of one row, over the tokens that it has: work is in the number of distinct ones."""

    def __init__(self, sampling: RowSampling) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        counts: dict[int, int] = dict.fromkeys(sampling.prompt.tolist() if self._repetition != 1.0 else (), 0)
        counts.update(Counter(sampling.output))
        self._place = {token: place for place, token in enumerate(counts)}
        # Room for as many again: they grow as the output does.
        self._ids = np.zeros(2 * len(counts) + 64, np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._ids[: len(counts)] = list(counts)
        self._counts[: len(counts)] = list(counts.values())

    def add(self, token: int) -> None:
        """It has been sampled."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1

    def apply(self, logits: Tensor) -> None:
        """:param logits: [V] float32, changed in place."""
        many = len(self._place)
        ids, counts = torch.from_numpy(self._ids[:many]), torch.from_numpy(self._counts[:many])
        values = logits[ids]
        if self._repetition != 1.0:
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        logits[ids] = values - (counts * self._frequency + (counts > 0) * self._presence)
