"""`Parsing`: the object that a constrained output stands for, made when somebody asks."""

from typing import Any

import msgspec

from aphoton.sampling import Grammar

__all__ = ["Parsing"]


class Parsing(msgspec.Struct, frozen=True):
    """A text and what it is of.

    :ivar complete: the text has not been cut.
    """

    grammar: Grammar
    text: str
    complete: bool

    def __call__(self) -> Any:
        """:raises ValueError: when the type that was asked for refuses what its schema allows."""
        return self.grammar.parse(self.text, complete=self.complete)
