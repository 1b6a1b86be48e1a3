"""The host's side of the KV cache: which page belongs to whom. Knows no model, no request and no torch."""

from aphoton.kv.pool import PagePool
from aphoton.kv.radix import CachedPage, RadixCache
from aphoton.kv.table import PageTable

__all__ = ["CachedPage", "PagePool", "PageTable", "RadixCache"]
