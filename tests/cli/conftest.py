"""Commands run for real: in this process, or in a terminal of their own."""

import json
from pathlib import Path

import pytest
import torch
from cli.running import Run
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from aphoton.cli import app
from aphoton.cli.peer import transformers_settings
from aphoton.models import random_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small gain nothing from threads, and on a busy machine lose much."""
    torch.set_num_threads(1)


@pytest.fixture
def run() -> Run:
    """``run("generate", "random:tiny", "Hi")``, and an exit code to expect other than 0."""

    def invoke(*arguments: str, code: int = 0, input: str | None = None) -> Result:
        result = CliRunner().invoke(app, arguments, input=input)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a chat template: random weights, and no end token."""
    folder = tmp_path_factory.mktemp("talker")
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
