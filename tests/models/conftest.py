"""Models of transformers to compare with, and rows that are fed to a decoder through pages."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from onethread import one_thread as one_thread

from aphoton.attention import KVCache
from aphoton.models import Decoder, StepInput

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Rows:
    """Rows of tokens on a decoder. Their pages are shuffled, and every byte of the cache starts as NaN."""

    def __init__(self, decoder: Decoder, *, page_size: int = 4, pages: int = 200) -> None:
        config = decoder.config
        self.decoder = decoder
        self.kv = KVCache(
            layers=config.num_layers,
            pages=pages,
            page_size=page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
        )
        self.kv.data.fill_(torch.nan)
        self._free = (np.random.default_rng(0).permutation(pages - 1) + 1).tolist()
        self._tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def feed(self, tokens: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """One step: new tokens of each row. Returns each row's logits."""
        starts = np.array([self.lengths.get(name, 0) for name in tokens], np.int32)
        lengths = np.array([len(fed) for fed in tokens.values()], np.int32)
        for name, length in zip(tokens, starts + lengths, strict=True):
            table = self._tables.setdefault(name, [])
            while len(table) * self.kv.page_size < length:
                table.append(self._free.pop())
            self.lengths[name] = int(length)
        tables = np.zeros((len(tokens), max(map(len, self._tables.values())) + 2), np.int32)
        for line, name in zip(tables, tokens, strict=True):
            line[: len(self._tables[name])] = self._tables[name]
        step = StepInput(
            tokens=torch.tensor([token for fed in tokens.values() for token in fed]),
            starts=torch.from_numpy(starts),
            lengths=torch.from_numpy(lengths),
            tables=torch.from_numpy(tables),
            host_starts=starts,
            host_lengths=lengths,
        )
        with torch.inference_mode():
            logits = self.decoder.forward(step, self.kv)
        assert logits.shape == (len(tokens), self.decoder.config.vocab_size)
        assert logits.dtype == torch.float32
        return dict(zip(tokens, logits, strict=True))


@pytest.fixture
def rows() -> type[Rows]:
    return Rows


@pytest.fixture
def make_reference() -> Callable[..., transformers.PreTrainedModel]:
    """A small model of transformers with every parameter random, biases and norms too."""

    def make(kind: str, **settings: object) -> transformers.PreTrainedModel:
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings}, attn_implementation="eager")
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(noise * 0.3 + (0.0 if name.endswith("bias") else 1.0))
        return model

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[[transformers.PreTrainedModel], Path]:
    def save_model(model: transformers.PreTrainedModel) -> Path:
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save_model
