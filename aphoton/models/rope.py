"""`Rope`: rotary position embeddings (arXiv:2104.09864) and the ways to stretch them."""

import math

import torch
from torch import Tensor

from aphoton.models.config import ModelConfig, RopeScaling

__all__ = ["Rope"]


class Rope:
    """Cosines and sines by position.

    A head's halves are rotated against each other (component i with component i + head_dim / 2), as Hugging Face's
    checkpoints expect; ``angle = position * inv_freq`` and both cosine and sine are multiplied by ``scale``.

    :ivar inv_freq: [head_dim / 2] float32, radians a position. With ``dynamic`` scaling: those of the trained length.
    :ivar scale: attention factor of ``yarn``, else 1.
    """

    def __init__(
        self, config: ModelConfig, *, factors: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """:param factors: [head_dim / 2] divisors of the frequencies that a GGUF file brings (``rope_freqs``)."""
        dim = config.head_dim
        self._theta = config.rope_theta
        # In float32 throughout: angles at far positions show every rounding of the frequencies.
        self._exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self._dynamic: RopeScaling | None = None
        self._power = dim / max(dim - 2, 1)
        self.scale = 1.0
        inv_freq = 1.0 / config.rope_theta**self._exponents
        scaling = config.rope_scaling
        if scaling is not None:
            if scaling.kind == "linear":
                inv_freq = inv_freq / scaling.factor
            elif scaling.kind == "dynamic":
                self._dynamic = scaling
            elif scaling.kind == "llama3":
                inv_freq = _llama3(inv_freq, scaling)
            else:
                inv_freq = _yarn(inv_freq, scaling, config.rope_theta, dim)
                self.scale = _yarn_attention(scaling)
        if factors is not None:
            inv_freq = inv_freq / factors.float().cpu()
        self.inv_freq: Tensor = inv_freq.to(device)
        self._exponents = self._exponents.to(device)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """:param positions: [T] integers. Returns cosines and sines, [T, head_dim / 2] float32 each."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies(positions)
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos, sin

    def _frequencies(self, positions: Tensor) -> Tensor:
        """[T or 1, head_dim / 2] of each position."""
        if self._dynamic is None:
            return self.inv_freq[None]
        # The stretch grows with the length so far, and is a token's own: what is in the KV cache then depends on
        # nothing but the tokens before it, however a prompt was cut into steps. It is what transformers gives when
        # tokens are fed one by one.
        trained = self._dynamic.original_max_len
        length = (positions.to(torch.float32) + 1).clamp(min=trained)
        stretch = self._dynamic.factor * length / trained - (self._dynamic.factor - 1)
        base = self._theta * stretch**self._power
        return 1.0 / base[:, None] ** self._exponents


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    turns = scaling.original_max_len * inv_freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return inv_freq / scaling.factor * (1 - keep) + inv_freq * keep


def _yarn(inv_freq: Tensor, scaling: RopeScaling, theta: float, dim: int) -> Tensor:
    """NTK-by-parts of arXiv:2309.00071, section 3.2, with the ramp over dimensions as its authors' code has it."""

    def dimension(turns: float) -> float:
        """The component pair that makes ``turns`` turns over the trained length."""
        return dim * math.log(scaling.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention(scaling: RopeScaling) -> float:
    """The attention factor: the checkpoint's own, or what arXiv:2309.00071 recommends, eq. 22."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
