"""`Checkpoint`: a model's configuration, weights, tokenizer and chat template, wherever they are stored."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from aphoton.errors import ModelError
from aphoton.models.config import ModelConfig
from aphoton.models.folder import FolderCheckpoint
from aphoton.models.gguf import GGUFCheckpoint
from aphoton.models.hub import resolve
from aphoton.models.random import PREFIX, random_checkpoint
from aphoton.progress import Progress
from aphoton.text.tokenizer import Tokenizer

__all__ = ["Checkpoint", "find_checkpoint", "open_checkpoint"]


class Checkpoint(Protocol):
    """A stored model. It may keep files mapped: drop it when the weights are loaded."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template in jinja, or None."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors under Hugging Face's names, read as they are asked for."""

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when it brings none."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file, or a folder with ``config.json`` and safetensors. Weights are not read yet, only checked
    for names and shapes.

    :raises ModelError: naming the file, what was found, and what was expected.
    """
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.exists():
        return GGUFCheckpoint(path)
    raise ModelError(f"{path}: no such file or folder, expected a .gguf file or a model folder")


def find_checkpoint(model: str | os.PathLike[str], progress: Progress | None = None) -> Checkpoint:
    """Opens the model that a user names, fetching it if it is not here yet. Blocks.

    :param model: a random model's name (``random:tiny``), or whatever `resolve` takes: a path, ``smollm2``, a hub id.
    :param progress: told how far the fetch is.
    :raises ModelError: for a model that is not there, cannot be fetched, read, or run.
    """
    if isinstance(model, str) and model.startswith(PREFIX):
        return random_checkpoint(model)
    return open_checkpoint(resolve(model, progress=progress))
