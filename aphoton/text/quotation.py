"""`Quotation`: stand-ins for what special tokens are written with, so that text is not read as special tokens."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

__all__ = ["Quotation"]

FIRST = 0x100000
"""Where stand-ins begin: a private use area, whose characters have no case, are no white space, and normalize to
themselves. Whoever writes one of them gets the character that it stands for, as text."""


class Quotation:
    """Quotes strings: puts stand-ins, one for one, for each character with which a special token begins or ends.

    What a program such as a chat template makes of quoted strings (trims, joins, changes the case) cannot become a
    special token, but for one whose two ends are the program's own.

    :param specials: the special tokens, as they are written.
    :param literal: they are searched for in a text as it is, and not in what a normalizer makes of it.
    :ivar pairs: each stand-in and what it stands for.
    """

    def __init__(self, specials: Iterable[str] = (), *, literal: bool = True) -> None:
        self._specials = tuple(filter(None, specials))
        self._literal = literal
        edges: set[str] = set()
        words: set[str] = set()
        for special in self._specials:
            # What names are made of is too common: templates ask for keys, roles and types by name. A token that both
            # begins and ends with it is quoted where all of it stands.
            marks = {
                char for char in (special[0], special[-1]) if not (char.isalnum() or char.isspace() or char == "_")
            }
            edges |= marks
            if not marks:
                words.add(special)
        letters = {case for word in words for case in (word[0].lower(), word[0].upper()) if len(case) == 1}
        self.pairs = tuple((chr(FIRST + i), char) for i, char in enumerate(sorted(edges | letters)))
        self._stand_ins = {char: stand_in for stand_in, char in self.pairs}
        self._edges = [(stand_in, char) for stand_in, char in self.pairs if char in edges]
        longest_first = map(re.escape, sorted(words, key=len, reverse=True))
        self._words = re.compile("|".join(longest_first), re.IGNORECASE) if words else None

    def quote(self, value: Any) -> Any:
        """``value`` with every string in its sequences, sets and mappings quoted, keys too."""
        if not self.pairs:
            return value
        if isinstance(value, str):
            if self._words is not None:
                value = self._words.sub(self._stand_in, value)
            for stand_in, char in self._edges:
                value = value.replace(char, stand_in)
            return value
        if isinstance(value, Mapping):
            return {self.quote(key): self.quote(one) for key, one in value.items()}
        if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray):
            return [self.quote(one) for one in value]
        return value

    def unescape(self, text: str) -> str:
        """``text`` with stand-ins in place of their escapes: Python's, and JSON's that is ASCII only, escape them where
        they would not escape what they stand for."""
        for stand_in, _ in self.pairs:
            for escape in (f"\\U{ord(stand_in):08x}", json.dumps(stand_in)[1:-1]):
                text = text.replace(escape, stand_in)
        return text

    def same(self, text: str, quoted: str) -> bool:
        """Whether a text surely has the special tokens that it has when the strings in it are quoted, and no others.

        Takes much less time than to encode the two.
        """
        if not self._literal:  # a normalizer may make one of what has nothing to quote
            return not self._specials
        return text == quoted or all(text.count(one) == quoted.count(one) for one in self._specials)

    def _stand_in(self, match: re.Match[str]) -> str:
        found = match.group()
        return self._stand_ins.get(found[0], found[0]) + found[1:]
