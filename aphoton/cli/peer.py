"""`TransformersPeer`: the same weights in Hugging Face's transformers, for comparison in the same run."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from aphoton.cli.missing import load_extra
from aphoton.models import Checkpoint, ModelConfig, RopeScaling
from aphoton.models.decoder import ROPE_FACTORS

__all__ = ["TransformersPeer", "peer_model", "transformers_settings"]

NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class TransformersPeer:
    """A model of transformers that runs one request at a time, greedily, with ``model.generate``.

    Nothing is fetched: its configuration and its weights are those that the engine has read.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        """:raises MissingExtra: when transformers is not installed."""
        self.dtype = dtype
        self._model = peer_model(checkpoint, getattr(torch, dtype))

    def run(self, prompt: Sequence[int], output_tokens: int) -> tuple[float, list[int]]:
        """Seconds, and the tokens: as many as asked for."""
        ids = torch.tensor([list(prompt)])
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - begin
        tokens: list[int] = output[0, len(ids[0]) :].tolist()
        return seconds, tokens


def peer_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The checkpoint in transformers' own class for its architecture."""
    transformers = load_extra("transformers", "bench")
    shape = checkpoint.config
    name = NAMES[shape.architecture]
    config = getattr(transformers, f"{name}Config")(**transformers_settings(shape))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    known = set(model.state_dict())
    weights = {}
    for key, tensor in checkpoint.weights():
        if key == ROPE_FACTORS:
            model.model.rotary_emb.inv_freq.div_(tensor)
        elif key in known:
            weights[key] = tensor.to(dtype)
    if shape.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    # Assigned, not copied: buffers that are not in a checkpoint, such as rotary frequencies, stay in float32.
    model.load_state_dict(weights, assign=True)
    return model.eval()


def transformers_settings(shape: ModelConfig) -> dict[str, Any]:
    """The shape in the terms of transformers' configurations."""
    settings: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_model_len,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(shape.eos_token_ids) or None,
        "pad_token_id": None,
    }
    if shape.rope_scaling is not None:
        settings["rope_parameters"] |= _scaling(shape.rope_scaling)
        if shape.rope_scaling.kind in ("linear", "dynamic"):
            settings["max_position_embeddings"] = shape.rope_scaling.original_max_len
    if shape.architecture in ("llama", "qwen3"):
        settings["attention_bias"] = shape.qkv_bias
    if shape.architecture == "mistral":
        settings["sliding_window"] = shape.window(0)
    elif shape.architecture in ("qwen2", "qwen3"):
        windows = [shape.window(layer) for layer in range(shape.num_layers)]
        settings["use_sliding_window"] = any(windows)
        settings["sliding_window"] = next(filter(None, windows), None)
        settings["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    return settings


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        settings["low_freq_factor"] = scaling.low_freq_factor
        settings["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        settings["beta_fast"], settings["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        settings["truncate"] = scaling.truncate
        if scaling.attention_factor is not None:
            settings["attention_factor"] = scaling.attention_factor
    if scaling.kind in ("llama3", "yarn"):
        settings["original_max_position_embeddings"] = scaling.original_max_len
    return settings
