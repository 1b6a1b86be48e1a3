"""`Staging`: a slot's way of sending arrays to the device, in one copy."""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["ALIGNED", "Staging", "aligned"]

ALIGNED = 4
"""Arrays begin at multiples of so many: kernels are compiled for pointers that are aligned to 16 bytes, or not."""

PARTS = 256
"""Sizes of copies whose tensors are kept."""


class Staging:
    """int32 arrays, packed one behind the other in pinned memory, and the same on the device.

    Hazard: what is packed, here and on the device, `room` included, belongs to the step until its results have been
    read: until then nothing is packed for the next step of this slot.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """:param size: int32 values, the gaps between arrays included (`ALIGNED` each)."""
        pinned = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        sent = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = pinned.numpy()
        self._device = sent
        self._used = 0
        # Kept, for decode steps come in few sizes. It must not hold this object, which would hold itself then.
        self._parts = lru_cache(PARTS)(lambda used: (sent[:used], pinned[:used]))

    def begin(self) -> None:
        """Pack anew. What was written to `room` before stays there, to be packed."""
        self._used = 0

    def room(self, count: int) -> NDArray[np.int32]:
        """Where the first array after `begin` is packed: ``count`` values that are there already need no copy."""
        return self._host[:count]

    def put(self, array: NDArray[np.int32], size: int | None = None) -> Tensor:
        """`write`, and where that will be on the device after `send`."""
        begin = self._used
        return self._device[begin : self.write(array, size)]

    def write(self, array: NDArray[np.int32], size: int | None = None) -> int:
        """Pack ``array``, filled up with zeros to ``size`` values; where that ends.

        The same sizes in the same order are at the same places, which is what a CUDA graph needs.
        """
        begin, count = self._used, array.size
        end = begin + (count if size is None else size)
        self._host[begin : begin + count] = array.ravel()  # numpy does nothing where they are the same memory
        if begin + count < end:
            self._host[begin + count : end] = 0
        self._used = aligned(end)
        return end

    def send(self) -> None:
        """Enqueue the one copy, on the current stream."""
        sent, pinned = self._parts(self._used)
        sent.copy_(pinned, non_blocking=True)


def aligned(size: int) -> int:
    """``size``, or a little more, so that what stands behind it is `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED
