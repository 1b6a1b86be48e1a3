"""`KVCache`: the pages of keys and values of all layers."""

import torch
from torch import Tensor

from aphoton.memory import system_zeros

__all__ = ["KVCache"]


class KVCache:
    """Keys and values, paged.

    :ivar data: [layers, 2, pages, page_size, kv_heads, head_dim]; index 0 of the second axis is keys. Page 0 is
        padding. Pages belong to whoever the pool gave them to; a step in flight may touch those of its rows.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = page_size
        shape = (layers, 2, pages, page_size, kv_heads, head_dim)
        # Zeroed, not empty: masked positions are still multiplied, and 0 * NaN is NaN.
        if torch.device(device).type == "cpu":
            self.data: Tensor = system_zeros(shape, dtype)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def page_bytes(*, layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        return layers * 2 * page_size * kv_heads * head_dim * dtype.itemsize
