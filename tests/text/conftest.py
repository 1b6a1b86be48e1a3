"""Small tokenizers of both families, made here, and the real one."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from aphoton.text import ChatTemplate, Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock, isn't it?",
    "def f(x):\n    return x ** 2  # 日本語のコメント",
    "Привет, мир! 你好，世界。 こんにちは 안녕하세요 🙂🙂 naïve café",
]


@pytest.fixture(scope="session")
def smollm2_fields(smollm2: Path) -> dict[str, Any]:
    """The metadata of SmolLM2's file."""
    reader = gguf.GGUFReader(smollm2)
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_fields: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_fields)


@pytest.fixture(scope="session")
def smollm2_chat(smollm2_fields: dict[str, Any], smollm2_tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(
        smollm2_fields["tokenizer.chat_template"],
        bos_token=smollm2_tokenizer.bos_token,
        eos_token=smollm2_tokenizer.eos_token,
    )


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE of 400 tokens, 2 of them special and one added."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=399,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<added token>"])
    return backend


@pytest.fixture(scope="session")
def sentencepiece_fields() -> dict[str, Any]:
    """The metadata of a SentencePiece BPE: bytes, then characters and unions of them with scores."""
    unions = ["▁t", "▁a", "he", "in", "re", "▁the", "er", "▁▁", "▁▁▁▁", "aa", "aaa", "aaaa", "ab", "ba", "bab", "▁th"]
    characters = [*"▁etaonihsrdlubcmfp.,'", "日", "本", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "<user>", *unions, *characters]
    types = [2, 3, 3, *[6] * 256, 4, *[1] * (len(unions) + len(characters))]
    scores = [0.0] * 260 + [-float(i) for i in range(len(tokens) - 260)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
