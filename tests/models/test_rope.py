"""Rotary frequencies where their values are known without another implementation."""

import math

import pytest
import torch

from aphoton.errors import ModelError
from aphoton.models import Decoder, ModelConfig, RopeScaling
from aphoton.models.decoder import ROPE_FACTORS, tensor_shapes
from aphoton.models.rope import Rope


def config(scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_model_len=32,
        rope_scaling=scaling,
    )


def test_frequencies_are_powers_of_the_base():
    rope = Rope(config())
    assert rope.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    cos, sin = rope.cos_sin(torch.tensor([0, 30]))
    assert cos[0].tolist() == [1, 1, 1, 1]
    assert cos[1].tolist() == pytest.approx([math.cos(30), math.cos(3), math.cos(0.3), math.cos(0.03)], abs=1e-6)
    assert sin[1].tolist() == pytest.approx([math.sin(30), math.sin(3), math.sin(0.3), math.sin(0.03)], abs=1e-6)


def test_dynamic_stretches_each_position_by_the_length_up_to_it():
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_max_len=16)
    plain, rope = Rope(config()), Rope(config(scaling))
    positions = torch.arange(16)
    assert torch.equal(torch.stack(rope.cos_sin(positions)), torch.stack(plain.cos_sin(positions)))
    # At twice the trained length the base grows by (2 * 2 - 1) ** (8 / 6).
    _, sin = rope.cos_sin(torch.tensor([31]))
    base = 10000 * 3 ** (8 / 6)
    assert sin[0].tolist() == pytest.approx([math.sin(31 * base ** (-i / 8)) for i in (0, 2, 4, 6)], abs=1e-6)


def test_position_of_a_token_alone_decides():
    """A prompt may be cut into steps anywhere: what is cached must not depend on it."""
    rope = Rope(config(RopeScaling(kind="dynamic", factor=2.0, original_max_len=16)))
    whole = torch.stack(rope.cos_sin(torch.arange(40)))
    parts = [torch.stack(rope.cos_sin(torch.arange(*cut))) for cut in ((0, 7), (7, 33), (33, 40))]
    torch.testing.assert_close(whole, torch.cat(parts, dim=1), rtol=0, atol=1e-6)


def test_yarn_recommends_an_attention_factor():
    def scale(**given: float) -> float:
        return Rope(config(RopeScaling(kind="yarn", original_max_len=16, **given))).scale

    assert scale(factor=4.0) == pytest.approx(0.1 * math.log(4) + 1)
    assert scale(factor=4.0, attention_factor=1.5) == 1.5
    assert scale(factor=1.0) == 1.0


def test_factors_divide_the_frequencies():
    rope = Rope(config(), factors=torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert rope.inv_freq.tolist() == pytest.approx([1.0, 0.05, 0.0025, 0.000125])


def test_factors_come_with_the_weights():
    weights = {name: torch.ones(shape) for name, shape in tensor_shapes(config()).items()}
    decoder = Decoder.load(config(), [*weights.items(), (ROPE_FACTORS, torch.full((4,), 2.0))])
    assert decoder.rope.inv_freq.tolist() == pytest.approx([0.5, 0.05, 0.005, 0.0005])
    with pytest.raises(ModelError, match=r"rope_freqs.weight has shape \[3\], expected \[4\]"):
        Decoder.load(config(), [*weights.items(), (ROPE_FACTORS, torch.ones(3))])
