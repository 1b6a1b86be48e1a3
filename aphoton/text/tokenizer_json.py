"""Tokenizers from a ``tokenizer.json``."""

import os
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from aphoton.errors import ModelError
from aphoton.text.subword import SubwordTokenizer

__all__ = ["load_json"]


class _Config(msgspec.Struct):
    """The parts of a ``tokenizer_config.json`` that are used. A token is its text, or an object with ``content``."""

    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None


def load_json(path: str | os.PathLike[str]) -> SubwordTokenizer:
    """See `Tokenizer.from_json`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # `tokenizers` raises plain `Exception`
        raise ModelError(f"{path}: not a tokenizer.json of the Hugging Face tokenizers library: {error}") from error
    # Some files carry the settings of the training run: a limit would cut prompts without a word.
    backend.no_truncation()
    backend.no_padding()

    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        tokens[i] = token

    config = _read_config(path.with_name("tokenizer_config.json"))
    bos, eos = _token_id(backend, config.bos_token), _token_id(backend, config.eos_token)
    # What goes around a text is said in tokenizer.json itself: beside it, transformers does not heed the other file's
    # add_bos_token either.
    return SubwordTokenizer(
        backend,
        tokens,
        source=str(path),
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
    )


def _read_config(path: Path) -> _Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except FileNotFoundError:
        return _Config()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not a tokenizer configuration: {error}") from error


def _token_id(backend: tokenizers.Tokenizer, token: str | dict[str, Any] | None) -> int | None:
    if isinstance(token, dict):
        token = token.get("content")
    return None if token is None else backend.token_to_id(token)
