"""The fused forward pass against the plain one, in steps with prompts and in steps that decode."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("aphoton.models.fused", reason="triton is not installed")

from models.fused_rows import FusedRows, TorchPlanner

from aphoton.kernels.triton import decode_attention
from aphoton.models import Decoder, ModelConfig
from aphoton.models.decoder import tensor_shapes

SHAPE: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_model_len": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, one KV head, tied, output bias": {"num_kv_heads": 1, "tie_embeddings": True, "o_bias": True},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True, "num_heads": 6, "hidden_size": 40},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 32, "tie_embeddings": True},
    "mistral, windows": {"architecture": "mistral", "layer_windows": (5, None)},
}
ROWS, PAGE_SIZE = 3, 4
# What each row feeds in each step: a number of prompt tokens, or DECODE for its last one. The second row goes on where
# the first has ended a page, and a window is behind all of them by then.
DECODE = None
STEPS: list[dict[int, int | None]] = [
    {2: 9, 1: 1},
    {1: DECODE, 3: 7, 2: DECODE},
    {3: DECODE, 1: DECODE, 2: DECODE},
    {2: DECODE, 3: DECODE},
    {1: 3, 2: DECODE},
    {1: DECODE, 2: DECODE, 3: DECODE},
]


def random_decoder(config: ModelConfig) -> Decoder:
    """With every parameter random, biases and norms too."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            weights[name] = noise * shape[1] ** -0.5
        else:
            weights[name] = noise * 0.3 + (0.0 if name.endswith("bias") else 1.0)
    return Decoder.load(config, weights.items())


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two splits of three rows: the interpreter takes its time over each."""
    monkeypatch.setattr(decode_attention, "PROCESSORS", 6)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_decoder(case: str, rows: Any) -> None:
    config = ModelConfig(**{**SHAPE, **CASES[case]})
    decoder = random_decoder(config)
    plain = rows(decoder, page_size=PAGE_SIZE, pages=40)
    on_device = random_decoder(config)
    if torch.cuda.is_available():
        on_device = moved(on_device)
    fused = FusedRows(
        on_device,
        TorchPlanner(PAGE_SIZE),
        rows=ROWS,
        positions=24,
        page_size=PAGE_SIZE,
        padding=1,
        unwritten=torch.nan,
    )
    generator = torch.Generator().manual_seed(1)
    for step in STEPS:
        fed = {
            row: torch.randint(config.vocab_size, (count or 1,), generator=generator).tolist()
            for row, count in step.items()
        }
        fused.set_last({row: fed[row][0] for row, count in step.items() if count is DECODE})
        expected = torch.stack(list(plain.feed({str(row): tokens for row, tokens in fed.items()}).values()))
        if all(count is DECODE for count in step.values()):
            found = fused.decode(list(step), padding=len(step) % 2)
        else:
            found = fused.mixed({row: None if step[row] is DECODE else tokens for row, tokens in fed.items()})
        torch.testing.assert_close(found, expected, rtol=5e-4, atol=5e-4)


def test_logits_behind_every_token(rows: Any) -> None:
    """Also of more tokens than have theirs made at once; the last ones, which are sampled, stay as they are."""
    decoder = random_decoder(ModelConfig(**SHAPE))
    plain = rows(decoder, page_size=PAGE_SIZE, pages=40)
    on_device = moved(decoder) if torch.cuda.is_available() else decoder
    fused = FusedRows(on_device, TorchPlanner(PAGE_SIZE), rows=ROWS, positions=40, page_size=PAGE_SIZE)
    prompt = torch.randint(61, (37,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = torch.stack([plain.feed({"1": [token]})["1"] for token in prompt])
    for begin, end in ((0, 35), (35, 37)):
        taken: list[Tensor] = []
        found = fused.mixed({3: [1, 2], 1: prompt[begin:end], 2: [5]}, {1: taken})
        assert [len(part) for part in taken] == ([16, 16, 3] if begin == 0 else [2])
        torch.testing.assert_close(torch.cat(taken), expected[begin:end], rtol=5e-4, atol=5e-4)
        torch.testing.assert_close(found[1], expected[end - 1], rtol=5e-4, atol=5e-4)


def moved(decoder: Decoder) -> Decoder:
    """The same on the GPU."""
    return Decoder.load(decoder.config, decoder._places().items(), device="cuda")


def test_what_the_kernels_cannot_run() -> None:
    decoder = random_decoder(ModelConfig(**{**SHAPE, "head_dim": 24}))
    with pytest.raises(ValueError, match="head_dim that is a power of two"):
        FusedRows(decoder, TorchPlanner(PAGE_SIZE), rows=1, positions=8, page_size=PAGE_SIZE)
