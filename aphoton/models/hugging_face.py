"""`read_config`: a `ModelConfig` from Hugging Face's ``config.json`` and ``generation_config.json``."""

import math
from typing import Any

from aphoton.errors import ModelError
from aphoton.models.config import Architecture, ModelConfig, RopeScaling
from aphoton.models.fields import Fields

__all__ = ["read_config"]

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """:param fields: of ``config.json``, as transformers 4 or 5 writes it.
    :param generation: of ``generation_config.json``: its end tokens come before those of ``config.json``.
    :raises ModelError: for what is missing or malformed, and for what this engine does not run.
    """
    architecture = _architecture(fields)
    _refuse(fields)
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", 128 if architecture == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    attention_bias = architecture in ("llama", "qwen3") and fields.boolean("attention_bias", False)
    theta, scaling, max_model_len = _rope(fields)
    eos = generation.ids("eos_token_id") if generation is not None else ()
    bos = fields.ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_model_len=max_model_len,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        qk_norm=architecture == "qwen3",
        layer_windows=_windows(fields, architecture, layers),
        eos_token_ids=eos or fields.ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(fields),
    )


def _architecture(fields: Fields) -> Architecture:
    names = fields.values.get("architectures") or [None]
    known = ARCHITECTURES.get(names[0]) if isinstance(names, list) and isinstance(names[0], str) else None
    if known is None:
        raise fields.error("architectures", f"one of {', '.join(ARCHITECTURES)}")
    return known


def _refuse(fields: Fields) -> None:
    """:raises ModelError: for settings under which the weights mean something else than what is computed here."""
    if fields.has("quantization_config"):
        raise ModelError(f"{fields.source}: has a quantization_config, expected weights that are not quantized")
    if fields.string("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "'silu'")
    if fields.boolean("mlp_bias", False):
        raise fields.error("mlp_bias", "false")


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.string(name, "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise fields.error(name, "float32, bfloat16 or float16")
    return dtype


def _windows(fields: Fields, architecture: Architecture, layers: int) -> tuple[int | None, ...]:
    if architecture == "llama":
        return ()
    if architecture == "mistral":
        # Not there means the first Mistral's 4096 to transformers, null means none.
        window = None
        if fields.has("sliding_window") or "sliding_window" not in fields.values:
            window = fields.integer("sliding_window", 4096)
        return (window,) * layers if window is not None else ()
    if not fields.boolean("use_sliding_window", False) or not fields.has("sliding_window"):
        return ()
    window = fields.integer("sliding_window")
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.values.get("max_window_layers", 28)
        if type(first) is not int:
            raise fields.error("max_window_layers", "an integer")
        return tuple(window if layer >= first else None for layer in range(layers))
    known: dict[Any, int | None] = {"sliding_attention": window, "full_attention": None}
    # Compared, not looked up: what a file holds may have no hash.
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in list(known) for kind in kinds):
        raise fields.error("layer_types", f"{layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _rope(fields: Fields) -> tuple[float, RopeScaling | None, int]:
    """Base of the frequencies, their scaling, and the positions that the two allow."""
    # transformers 5 keeps all of it in rope_parameters; 4 has rope_theta beside rope_scaling, under two names for kind.
    rope = fields.inner("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta") if rope.has("rope_theta") else fields.number("rope_theta", 10000.0)
    kind = rope.string("rope_type") if rope.has("rope_type") else rope.string("type", "default")
    positions = fields.integer("max_position_embeddings")
    for place in (fields, rope):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor", "1: whole heads are rotated")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise ModelError(f"{rope.source}: differs by layer, expected one for all layers")
    if kind == "default":
        return theta, None, positions
    if kind in ("linear", "dynamic"):
        factor = rope.number("factor")
        scaling = RopeScaling(
            kind="linear" if kind == "linear" else "dynamic", factor=factor, original_max_len=positions
        )
        return theta, scaling, _stretched(rope, positions, factor)
    # The top level's goes first, as in transformers.
    place = fields if fields.has("original_max_position_embeddings") else rope
    original = place.integer("original_max_position_embeddings", positions)
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            original_max_len=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise rope.error("high_freq_factor", f"more than low_freq_factor ({scaling.low_freq_factor:g})")
        return theta, scaling, positions
    if kind == "yarn":
        if theta <= 1:  # its logarithm tells the frequencies apart
            raise (rope if rope.has("rope_theta") else fields).error("rope_theta", "more than 1 for yarn")
        factor = rope.number("factor", positions / original)
        scaling = RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_len=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=_yarn_attention(rope, factor),
            truncate=rope.boolean("truncate", True),
        )
        return theta, scaling, max(positions, _stretched(rope, original, factor))
    raise rope.error("rope_type" if rope.has("rope_type") else "type", "default, linear, dynamic, yarn or llama3")


def _stretched(rope: Fields, positions: int, factor: float) -> int:
    """Positions of a model whose ``positions`` are stretched."""
    stretched = positions * factor
    if not 1 <= stretched < 2**31:
        raise rope.error("factor", f"one that makes from 1 to below 2**31 positions of {positions}")
    return int(stretched)


def _yarn_attention(rope: Fields, factor: float) -> float | None:
    """``attention_factor``, or what ``mscale`` and ``mscale_all_dim`` make of it (as in transformers)."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if not (rope.values.get("mscale") and rope.values.get("mscale_all_dim")):
        return None
    logarithm = 0.1 * math.log(max(factor, 1.0))
    return (logarithm * rope.number("mscale") + 1) / (logarithm * rope.number("mscale_all_dim") + 1)
