"""A small model that can chat, made for tests."""

import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aphoton.cli.peer import transformers_settings
from aphoton.models import random_checkpoint

__all__ = ["make_talker"]


def make_talker(folder: Path) -> Path:
    """A model folder with a tokenizer and a chat template: random weights, and no end token."""
    checkpoint = random_checkpoint("random:tiny")
    save_file(dict(checkpoint.weights()), folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], **transformers_settings(checkpoint.config)}
    (folder / "config.json").write_text(json.dumps(config))
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"word{n}," for n in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return folder
