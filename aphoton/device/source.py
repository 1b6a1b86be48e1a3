"""`Source`: a model that is about to be loaded onto a device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aphoton.attention import KVCache
from aphoton.config import EngineConfig
from aphoton.device.base import Limits
from aphoton.errors import InvalidRequest
from aphoton.models import ModelConfig

__all__ = ["Source"]

TOKENS_PER_ROW = 1024
"""KV cache per row when the configuration gives no size: most requests are shorter, and rows share the pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model's shape and its weights, which can be read once.

    :ivar weights: tensors under Hugging Face's names.
    :ivar name: what to call it in an error.
    :ivar max_model_len: tokens of the longest sequence to run.
    """

    config: ModelConfig
    weights: Iterator[tuple[str, Tensor]]
    name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def pages(self, config: EngineConfig, dtype: torch.dtype, memory: int) -> int:
        """Pages of KV cache: as many as the configuration says, else enough for its rows, within ``memory`` bytes.

        Page 0, which is padding, is not among them.
        """
        page = self._page_bytes(config, dtype)
        if config.kv_pages is not None:
            return config.kv_pages
        if config.kv_memory is not None:
            if config.kv_memory < page:
                raise InvalidRequest(
                    "kv_memory", f"must hold at least one page of {page} bytes, not {config.kv_memory}"
                )
            return config.kv_memory // page
        longest = -(-self.max_model_len // config.page_size)
        usual = -(-min(self.max_model_len, TOKENS_PER_ROW) // config.page_size)
        return max(1, min(max(longest, config.max_rows * usual), memory // page))

    def kv_cache(
        self, config: EngineConfig, dtype: torch.dtype, pages: int, device: torch.device | str = "cpu"
    ) -> KVCache:
        """An empty cache of so many pages, and the padding page."""
        return KVCache(
            layers=self.config.num_layers,
            pages=pages + 1,
            page_size=config.page_size,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
            device=device,
        )

    def limits(self, pages: int, dtype: torch.dtype, kernels: str) -> Limits:
        """What the model allows, loaded so."""
        return Limits(
            vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            pages=pages + 1,
            eos_token_ids=self.eos_token_ids,
            dtype=str(dtype).removeprefix("torch."),
            kernels=kernels,
        )

    def _page_bytes(self, config: EngineConfig, dtype: torch.dtype) -> int:
        return KVCache.page_bytes(
            layers=self.config.num_layers,
            page_size=config.page_size,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
        )
