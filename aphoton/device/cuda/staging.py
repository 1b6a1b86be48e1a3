"""`Staging`: a slot's way of sending arrays to the device, in one copy."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Staging"]

ALIGNED = 4
"""Arrays begin at multiples of so many: kernels are compiled for pointers that are aligned to 16 bytes, or not."""


class Staging:
    """int32 arrays, packed one behind the other in pinned memory, and the same on the device.

    Hazard: what `put` returns, and the pinned memory behind it, `room` included, belong to the step until its results
    have been read: until then nothing is packed for the next step of this slot.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """:param size: int32 values, the gaps between arrays included (`ALIGNED` each)."""
        self._pinned = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = self._pinned.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._used = 0

    def begin(self) -> None:
        """Pack anew. What was written to `room` before stays there, for `put`."""
        self._used = 0

    def room(self, count: int) -> NDArray[np.int32]:
        """Where what is `put` first after `begin` is packed: ``count`` values that are there already need no copy."""
        return self._host[:count]

    def put(self, array: NDArray[np.int32], size: int | None = None) -> Tensor:
        """Pack ``array``, filled up with zeros to ``size`` values; where it will be on the device after `send`.

        The same sizes in the same order are at the same places, which is what a CUDA graph needs.
        """
        begin, count = self._used, array.size
        end = begin + (count if size is None else size)
        self._host[begin : begin + count] = array.ravel()  # numpy does nothing where they are the same memory
        self._host[begin + count : end] = 0
        self._used = -(-end // ALIGNED) * ALIGNED
        return self._device[begin:end]

    def send(self) -> None:
        """Enqueue the one copy, on the current stream."""
        self._device[: self._used].copy_(self._pinned[: self._used], non_blocking=True)
