"""`ModelConfig`: the shape of a decoder-only language model."""

from typing import Literal

import msgspec

__all__ = ["Architecture", "ModelConfig", "RopeScaling"]

Architecture = Literal["llama", "qwen2", "qwen3", "mistral"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched for contexts longer than the model was trained on.

    :ivar kind: ``linear`` (arXiv:2306.15595), ``dynamic`` (NTK by length), ``yarn`` (arXiv:2309.00071) or ``llama3``
        (by wavelength, as in the Llama 3.1 model card).
    :ivar original_max_len: positions of the model before stretching.
    :ivar low_freq_factor, high_freq_factor: of ``llama3``: turns over ``original_max_len`` below which a frequency is
        divided by ``factor``, and above which it is kept.
    :ivar beta_fast, beta_slow, truncate: of ``yarn``: the same as turns, and whether the bounds are rounded outwards.
    :ivar attention_factor: of ``yarn``: multiplies cosines and sines. None: as the paper recommends for ``factor``.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: float
    original_max_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model, in the terms of its architecture.

    :ivar max_model_len: positions that the model was made for.
    :ivar qkv_bias, o_bias: whether the attention's input and output projections add a bias.
    :ivar qk_norm: whether each head's query and key are normalized before rotation.
    :ivar layer_windows: per layer, the sliding window in tokens (a token sees itself and window - 1 before it), or
        None; empty when no layer has one.
    :ivar dtype: of the checkpoint, e.g. ``"bfloat16"``.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    def window(self, layer: int) -> int | None:
        """The sliding window of ``layer`` in tokens, or None for full attention."""
        return self.layer_windows[layer] if self.layer_windows else None
