"""The model that we give to transformers is the one that was stored: same logits as transformers reads it."""

from pathlib import Path

import pytest
import torch

from aphoton.models import open_checkpoint

transformers = pytest.importorskip("transformers")

from aphoton.cli.peer import peer_model  # noqa: E402

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 24,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 20.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 8,
}
CASES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases, llama3": ("Llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3}}),
    "llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "mistral, window": ("Mistral", {"sliding_window": 5}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3, yarn": ("Qwen3", {"rope_parameters": YARN, "max_position_embeddings": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_logits(case: str, tmp_path: Path) -> None:
    kind, settings = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{"tie_word_embeddings": False, **SIZES, **settings})
    original = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in original.named_parameters():
        parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 2 or name.endswith("bias") else 0.05))
    original.save_pretrained(tmp_path)
    ids = torch.randint(SIZES["vocab_size"], (1, 40))
    with torch.inference_mode():
        expected = original(ids).logits
        ours = peer_model(open_checkpoint(tmp_path), torch.float32)(ids).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
