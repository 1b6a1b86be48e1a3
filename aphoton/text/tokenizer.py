"""`Tokenizer`: text to token ids and back."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from aphoton.errors import InvalidRequest
from aphoton.text.detokenizer import Detokenizer
from aphoton.text.quotation import Quotation
from aphoton.text.vocabulary import Vocabulary

__all__ = ["Tokenizer"]


class Tokenizer(ABC):
    """Text to token ids and back. Safe to use from several threads at once.

    :ivar vocabulary: the bytes of every id.
    :ivar bos_token, eos_token: as chat templates spell them; empty when the model has none.
    :ivar eos_token_ids: the end tokens that the tokenizer's own file names. A model's configuration may name more.
    :ivar quotation: quotes strings for `encode_quoted`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        bos_token: str = "",
        bos_token_id: int | None = None,
        eos_token: str = "",
        eos_token_ids: Iterable[int] = (),
        quotation: Quotation | None = None,
    ) -> None:
        """:param quotation: of what `encode` reads in a text as special tokens; None: of nothing."""
        self.vocabulary = vocabulary
        self.bos_token = bos_token
        self.bos_token_id = bos_token_id
        self.eos_token = eos_token
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.quotation = quotation or Quotation()

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> "Tokenizer":
        """From a ``tokenizer.json``, and the ``tokenizer_config.json`` beside it if there is one.

        :raises ModelError: for a file that cannot be read or used, naming it.
        """
        from aphoton.text.tokenizer_json import load_json

        return load_json(path)

    @staticmethod
    def from_gguf(fields: Mapping[str, Any], *, source: str = "GGUF metadata") -> "Tokenizer":
        """From the metadata of a GGUF file: its keys, with strings, numbers and lists as values.

        :param source: the file's name, for errors.
        :raises ModelError: for metadata that is missing or of a kind that is not known.
        """
        from aphoton.text.tokenizer_gguf import load_gguf

        return load_gguf(fields, source)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows. The model's own vocabulary may be padded to more."""
        return len(self.vocabulary)

    @property
    def special_ids(self) -> frozenset[int]:
        return self.vocabulary.special_ids

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of ``text``. Takes about a second for 2 MB; other threads run meanwhile.

        :param add_special_tokens: put the tokens around it that the model expects around a text, such as BOS. Not
            for a rendered chat template, which brings its own.
        :param parse_special: read ``<|im_end|>`` and the like in ``text`` as the special tokens that they name, as
            chat templates need and as Hugging Face does; otherwise they are text like any other.
        :raises InvalidRequest: for text with a lone surrogate, which is not Unicode text.
        """

    def encode_quoted(self, text: str) -> list[int]:
        """The ids of ``text``, in which strings quoted by `quotation` are text like any other, and what is not quoted
        is read as by `encode`. Adds no special tokens around it.

        :raises InvalidRequest: as `encode`.
        """
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary add nothing.

        :raises InvalidRequest: for a negative id.
        """
        ids = list(ids)
        if ids and min(ids) < 0:
            raise InvalidRequest("ids", f"must not be negative, not {min(ids)}")
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this id adds to a text; a special token's own name for a special token."""
        return self.vocabulary.pieces[token_id] if 0 <= token_id < self.vocab_size else b""


def check_unicode(text: str, field: str = "text") -> bytes:
    """``text`` in UTF-8.

    :raises InvalidRequest: for text with a lone surrogate, naming ``field``.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidRequest(
            field, f"is not Unicode text: a lone surrogate U+{ord(text[at]):04X} at character {at}"
        ) from None
