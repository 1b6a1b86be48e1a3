"""Attention over paged keys and values: `KVCache` and `TorchAttention`, the reference that runs everywhere."""

from aphoton.attention.cache import KVCache
from aphoton.attention.torch import Plan, TorchAttention

__all__ = ["KVCache", "Plan", "TorchAttention"]
