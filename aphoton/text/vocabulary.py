"""`Vocabulary`: what every token id stands for, as bytes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aphoton.errors import ModelError

__all__ = ["Vocabulary", "byte_alphabet"]


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte.

    Bytes that print in Latin-1 stand for themselves; the 68 others are numbered from U+0100 on, in order (GPT-2's
    table).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + hidden.index(byte)) for byte in range(256)]


class Vocabulary:
    """A table from token id to the bytes that it adds to a text.

    With it, decoding costs one look-up a token, whatever came before. A token need not be whole characters: only the
    joined bytes are UTF-8.

    :ivar pieces: bytes of each id.
    :ivar shown: the same, with nothing for special tokens.
    :ivar special_ids: ids that are no text: end marks, chat marks, padding.
    :ivar leading_spaces: spaces that a text loses at its start, when the tokenizer puts them there.
    """

    __slots__ = ("leading_spaces", "pieces", "shown", "special_ids")

    def __init__(self, pieces: Sequence[bytes], special_ids: Iterable[int] = (), leading_spaces: int = 0) -> None:
        self.pieces = list(pieces)
        self.special_ids = frozenset(special_ids)
        self.shown = [b"" if i in self.special_ids else piece for i, piece in enumerate(self.pieces)]
        self.leading_spaces = leading_spaces

    def __len__(self) -> int:
        return len(self.pieces)

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequence[str],
        special_ids: Iterable[int],
        decoder: Mapping[str, Any] | None,
        *,
        source: str,
    ) -> "Vocabulary":
        """The table of tokens as a tokenizer spells them.

        :param decoder: how spellings become text: the ``decoder`` of a ``tokenizer.json``.
        :param source: the file's name, for errors.
        :raises ModelError: for a decoder whose tokens have no bytes of their own (WordPiece, CTC, a regex).
        """
        steps = [] if decoder is None else _flatten(decoder)
        replacements: list[tuple[str, str]] = []
        byte_level = byte_fallback = fused = False
        leading_spaces = 0
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    replacements.append((old, new))
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                    leading_spaces = start
                case _:
                    raise ModelError(
                        f"{source}: cannot stream text through the tokenizer's decoder step {dict(step)}; expected "
                        "ByteLevel, or Replace, ByteFallback, Fuse and Strip"
                    )
        if not steps:
            raise ModelError(f"{source}: the tokenizer has no decoder; expected ByteLevel or ByteFallback")

        byte_of = {char: byte for byte, char in enumerate(byte_alphabet())} if byte_level else {}

        def piece(token: str) -> bytes:
            for old, new in replacements:
                token = token.replace(old, new)
            if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    return token.encode()
            try:
                # A token with any other character is an added one, written as plain text.
                return bytes([byte_of[char] for char in token]) if byte_level else token.encode()
            except KeyError:
                return token.encode()

        return cls([piece(token) for token in tokens], special_ids, leading_spaces)


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a decoder, those of nested sequences included."""
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]
