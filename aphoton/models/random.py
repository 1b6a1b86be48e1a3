"""`RandomCheckpoint`: a model with random weights, for tests and measurements."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from aphoton.errors import ModelError
from aphoton.models.ahead import ahead
from aphoton.models.config import ModelConfig
from aphoton.models.decoder import tensor_shapes
from aphoton.text.tokenizer import Tokenizer

__all__ = ["PREFIX", "RandomCheckpoint", "random_checkpoint"]

PREFIX = "random:"
"""What names of random models begin with."""
MOST_DIGITS = 20
"""Of a seed."""

SHAPES = {
    "tiny": ModelConfig(
        architecture="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_model_len=2048,
        tie_embeddings=False,
    ),
    # SmolLM2-135M, Llama 3.2 1B and Llama 3.1 8B, without the scaling of their frequencies.
    "135m": ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_model_len=8192,
        tie_embeddings=True,
        dtype="bfloat16",
    ),
    "1b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_model_len=131072,
        tie_embeddings=True,
        dtype="bfloat16",
    ),
    "8b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_model_len=131072,
        dtype="bfloat16",
    ),
}


class RandomCheckpoint:
    """Weights from a seed. They have no end token, no tokenizer and no chat template.

    The same name, seed and config give the same weights, in whatever order and number of threads they are made.
    """

    chat_template: str | None = None

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self.seed = seed

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in float32. A few are made ahead."""
        return ahead(self._weight, tensor_shapes(self.config).items())

    def tokenizer(self) -> Tokenizer | None:
        return None

    def _weight(self, item: tuple[str, tuple[int, ...]]) -> tuple[str, Tensor]:
        name, shape = item
        if len(shape) == 1:
            return name, torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        # Variance 1 / inputs keeps activations near 1 at any width, so that greedy outputs vary with the prompt;
        # and the embedding is small beside what the layers add, or a tied head would repeat the last token.
        return name, torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)


def random_checkpoint(name: str) -> RandomCheckpoint:
    """The model of a name like ``random:tiny`` or, with a seed other than 0, ``random:tiny:7``.

    :raises ModelError: for a shape that is not known, or a seed that is not a number of up to 20 digits.
    """
    shape, _, seed = name.removeprefix(PREFIX).partition(":")
    is_seed = (seed or "0").isdecimal() and len(seed) <= MOST_DIGITS
    if not name.startswith(PREFIX) or shape not in SHAPES or not is_seed:
        known = ", ".join(PREFIX + shape for shape in SHAPES)
        raise ModelError(
            f"{name}: no such random model, expected one of {known}, and perhaps :seed of up to {MOST_DIGITS} digits"
        )
    return RandomCheckpoint(SHAPES[shape], int(seed or 0))
