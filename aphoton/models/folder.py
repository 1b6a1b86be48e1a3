"""`FolderCheckpoint`: a model folder as on Hugging Face's hub."""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from aphoton.errors import ModelError
from aphoton.models.decoder import check_tensors
from aphoton.models.fields import Fields
from aphoton.models.hugging_face import read_config
from aphoton.text.tokenizer import Tokenizer

__all__ = ["FolderCheckpoint"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class FolderCheckpoint:
    """A folder with ``config.json`` and safetensors, whole or in shards.

    :ivar config: from ``config.json`` and, for the end tokens, ``generation_config.json``.
    :ivar chat_template: source of the default one, or None.
    :raises ModelError: when it is opened, for what is missing, malformed, or not run by this engine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = _read(path / "config.json")
        if fields is None:
            raise ModelError(f"{path}: has no config.json, expected a model folder")
        self.config = read_config(fields, _read(path / "generation_config.json"))
        self._files = self._find_files()
        check_tensors(self.config, self._shapes(), str(path))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, under the names that they have in the files. One is read at a time."""
        for file in self._files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    yield name, tensors.get_tensor(name)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of ``tokenizer.json``; None when there is no such file."""
        file = self.path / "tokenizer.json"
        return Tokenizer.from_json(file) if file.exists() else None

    @cached_property
    def chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.exists():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelError(f"{file}: cannot be read: {error}; expected text in UTF-8") from error
        fields = _read(self.path / "tokenizer_config.json")
        if fields is None or not fields.has("chat_template"):
            return None
        template: Any = fields.values["chat_template"]
        if isinstance(template, list):
            # Several under names, as tokenizers of transformers 4 stored them.
            try:
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            except (TypeError, KeyError):
                raise fields.error("chat_template", "a string, or a list of names and templates") from None
        if not isinstance(template, str | None):
            raise fields.error("chat_template", "a string, or a list of names and templates")
        return template

    def _find_files(self) -> list[Path]:
        index = _read(self.path / INDEX)
        if index is None:
            names = [SINGLE]
        else:
            shards = index.inner("weight_map").values.values()
            if not shards or not all(isinstance(shard, str) for shard in shards):
                raise index.error("weight_map", "names of tensors and of their files")
            names = sorted(set(shards))
        for name in names:
            try:
                found = (self.path / name).is_file()
            except OSError:  # of a name that no file can have
                found = False
            if not found:
                expected = f"expected by {INDEX}" if index is not None else f"expected it, or {INDEX}"
                raise ModelError(f"{self.path / name}: no such file; {expected}")
        return [self.path / name for name in names]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for file in self._files:
            # Opening checks the header, and that the file is as long as the header says.
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                        shapes[name] = tuple(tensors.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: not a whole safetensors file: {error}") from error
        return shapes


def _read(file: Path) -> Fields | None:
    """The fields of a JSON file; None when there is no such file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read: {error}; expected a JSON object") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file}: holds a {type(values).__name__}, expected a JSON object")
    return Fields(values, str(file))
