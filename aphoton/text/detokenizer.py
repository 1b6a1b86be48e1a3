"""`Detokenizer`: token ids to text, as they come."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aphoton.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence, piece by piece. One look-up a token, whatever came before.

    All pieces joined are `Tokenizer.decode` of all ids, however they are split over calls, and no piece holds half a
    character: its bytes wait for the rest.

    Each maximal part of a broken sequence becomes one U+FFFD (Unicode 3.9, U+FFFD substitution), which is what
    `tokenizers` does for byte-level BPE. For byte-fallback vocabularies `tokenizers` replaces every byte of a run
    that has an error anywhere, and so cannot show the run before its end: here it is streamed too.

    :param continues: the text goes on from another, so a space that a tokenizer puts before the first word is kept.
    """

    __slots__ = ("_decoder", "_pieces", "_spaces")

    def __init__(self, tokenizer: "Tokenizer", *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        vocabulary = tokenizer.vocabulary
        self._pieces = vocabulary.shown if skip_special_tokens else vocabulary.pieces
        self._spaces = 0 if continues else vocabulary.leading_spaces
        self._decoder = _UTF8("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete. Ids beyond the vocabulary (a padded embedding) add nothing."""
        pieces = self._pieces
        try:
            data = pieces[ids[0]] if len(ids) == 1 else b"".join([pieces[i] for i in ids])
        except IndexError:
            data = b"".join([pieces[i] for i in ids if i < len(pieces)])
        # Most pieces are plain ASCII behind whole characters, and the incremental decoder is written in Python.
        text = data.decode() if data.isascii() and not self._decoder.buffer else self._decoder.decode(data)
        return self._strip(text) if self._spaces else text

    def finish(self) -> str:
        """What is left: U+FFFD when the last character is not complete. The detokenizer is as new after this."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._spaces and text:
            if text[0] != " ":
                self._spaces = 0
            else:
                self._spaces -= 1
                text = text[1:]
        return text
