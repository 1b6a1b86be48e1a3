"""`ByteTokenizer`: for models that have no tokenizer of their own."""

from collections.abc import Iterable

from aphoton.errors import ModelError
from aphoton.text.tokenizer import Tokenizer, check_unicode
from aphoton.text.vocabulary import Vocabulary

__all__ = ["ByteTokenizer"]


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes. An id beyond shows as its number, ``<300>``, so that a random model's output is seen.

    Such numbers are for reading only: encoding them gives their bytes.

    :param eos_token_ids: end tokens; they show as nothing.
    :raises ModelError: for a vocabulary that has no room for all bytes.
    """

    def __init__(self, vocab_size: int, *, eos_token_ids: Iterable[int] = ()) -> None:
        if vocab_size < 256:
            raise ModelError(f"a vocabulary of {vocab_size} tokens cannot hold the 256 bytes")
        ends = tuple(eos_token_ids)
        pieces = [bytes([i]) if i < 256 else f"<{i}>".encode() for i in range(vocab_size)]
        super().__init__(Vocabulary(pieces, special_ids=ends), eos_token_ids=ends)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The UTF-8 bytes of ``text``: there are no special tokens to add or to parse."""
        return list(check_unicode(text))
