"""Small decoders with random weights, and rows that are fed to them through shuffled pages."""

import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from aphoton.attention import KVCache
from aphoton.models import Decoder, ModelConfig, StepInput

COMPILER = shlex.split(os.environ.get("CC") or "cc")[0]

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C compiler {COMPILER!r}")
"""With a compiler, the kernels must build: otherwise their tests fail, they are not skipped."""

LLAMA: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_model_len": 2048,
}


def random_decoder(
    dtype: torch.dtype = torch.float32, *, held_as: torch.dtype | None = None, seed: int = 0, **settings: object
) -> Decoder:
    """A torch decoder of random weights of ``dtype``, biases and norms included.

    :param held_as: the decoder's dtype, when it is not the weights': the same numbers, computed with more bits.
    """
    decoder = Decoder(ModelConfig(**{**LLAMA, **settings}), dtype=held_as or dtype)
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor | None, scale: float, mean: float = 0.0) -> None:
        if tensor is not None:
            tensor.copy_((torch.randn(tensor.shape, generator=generator) * scale + mean).to(dtype))

    fill(decoder.embed, 1.0)
    for layer in decoder.layers:
        for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm):
            fill(norm, 0.3, 1.0)
        for bias in (layer.qkv_bias, layer.o_bias):
            fill(bias, 0.3)
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            fill(matrix, matrix.shape[1] ** -0.5)
    fill(decoder.final_norm, 0.3, 1.0)
    if decoder.lm_head is not decoder.embed:
        fill(decoder.lm_head, decoder.lm_head.shape[1] ** -0.5)
    return decoder


class Forward(Protocol):
    def forward(self, step: StepInput, kv: KVCache) -> Tensor: ...
    def forward_scored(
        self, step: StepInput, kv: KVCache, scored: Mapping[int, int], take: Callable[[int, Tensor], None]
    ) -> Tensor: ...


class Rows:
    """Rows of tokens on a decoder. Their pages are shuffled, and every byte of the cache starts as NaN."""

    def __init__(
        self, model: Forward, config: ModelConfig, dtype: torch.dtype, *, page_size: int = 16, tokens: int = 4096
    ) -> None:
        pages = tokens // page_size
        self.model = model
        self.kv = KVCache(
            layers=config.num_layers,
            pages=pages,
            page_size=page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )
        self.kv.data.fill_(torch.nan)
        self._free = (np.random.default_rng(0).permutation(pages - 1) + 1).tolist()
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, fed: dict[int, Sequence[int]]) -> StepInput:
        """The next step, which gives each row its new tokens."""
        starts = np.array([self._lengths.get(row, 0) for row in fed], np.int32)
        lengths = np.array([len(tokens) for tokens in fed.values()], np.int32)
        for row, length in zip(fed, starts + lengths, strict=True):
            table = self._tables.setdefault(row, [])
            while len(table) * self.kv.page_size < length:
                table.append(self._free.pop())
            self._lengths[row] = int(length)
        tables = np.zeros((len(fed), max(len(self._tables[row]) for row in fed) + 1), np.int32)
        for line, row in zip(tables, fed, strict=True):
            line[: len(self._tables[row])] = self._tables[row]
        return StepInput(
            tokens=torch.tensor([token for tokens in fed.values() for token in tokens]),
            starts=torch.from_numpy(starts),
            lengths=torch.from_numpy(lengths),
            tables=torch.from_numpy(tables),
            host_starts=starts,
            host_lengths=lengths,
        )

    def feed(self, fed: dict[int, Sequence[int]]) -> Tensor:
        """Runs one step. Returns the rows' logits, in the order of ``fed``."""
        with torch.inference_mode():
            return self.model.forward(self.step(fed), self.kv)

    def feed_scored(self, fed: dict[int, Sequence[int]], scored: dict[int, int]) -> tuple[Tensor, dict[int, Tensor]]:
        """The same, and of the first so many tokens of some rows, [m, V] the logits behind each."""
        order, parts = list(fed), {row: list[Tensor]() for row in scored}
        with torch.inference_mode():
            last = self.model.forward_scored(
                self.step(fed),
                self.kv,
                {order.index(row): count for row, count in scored.items()},
                lambda index, logits: parts[order[index]].append(logits),
            )
        return last, {row: torch.cat(taken) for row, taken in parts.items()}
