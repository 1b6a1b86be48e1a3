"""What is asked of one value at the same time, and limits of that.

llguidance bounds what a grammar costs, but for the search of a first text that all conditions allow: that goes through
the product of their automata, and cannot be stopped.
"""

import re
from decimal import Decimal
from math import lcm
from typing import Any, NamedTuple

__all__ = ["check_lark", "check_schema"]

MAX_DIVISOR, MAX_PATTERNS = 100_000, 4
"""States of an automaton that divides, which takes 0.5 s; and patterns that a text must match."""

PATTERNS = ("pattern", "format")
QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')


def check_schema(schema: Any) -> None:
    """:raises ValueError: for a JSON schema with a value that too much is asked of."""
    known: dict[int, Asked] = {}
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += part.values()
            _asked(part, schema, known)


def check_lark(text: str) -> None:
    """:raises ValueError: for a Lark grammar with too many intersections of terminals."""
    if (count := QUOTED.sub("", text).count("&")) >= MAX_PATTERNS:
        raise ValueError(f"has {count} intersections (&): there may be {MAX_PATTERNS - 1}")


class Asked(NamedTuple):
    """Of one value: how many patterns it must match, and what it must be a multiple of, ``digits / 10**places``."""

    patterns: int = 0
    digits: int = 1
    places: int = 0


def _asked(part: Any, root: Any, known: dict[int, Asked]) -> Asked:
    """By a schema, and all that it refers to. Of alternatives the one with most patterns counts, and all divisors.

    :param known: of parts that have been looked at: two references to one part cost no more than one.
    """
    if not isinstance(part, dict):
        return Asked()
    if id(part) in known:
        return known[id(part)]
    known[id(part)] = Asked()  # while it is looked at: a reference to itself asks nothing more
    every = [part["allOf"]] if isinstance(part.get("allOf"), list) else []
    some = [part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)]
    musts = [_asked(one, root, known) for ones in every for one in ones]
    musts.append(_asked(_target(root, part.get("$ref")), root, known))
    mays = [[_asked(one, root, known) for one in ones] for ones in some]
    patterns = sum(name in part for name in PATTERNS) + sum(one.patterns for one in musts)
    patterns += sum(max((one.patterns for one in ones), default=0) for ones in mays)
    if patterns > MAX_PATTERNS:
        raise ValueError(f"asks one text to match {patterns} patterns and formats: {MAX_PATTERNS} is the limit")
    divisors = [_divisor(part.get("multipleOf")), *musts, *(one for ones in mays for one in ones)]
    places = max(one.places for one in divisors)
    digits = lcm(*(one.digits * 10 ** (places - one.places) for one in divisors if one.digits > 1 or one.places))
    if digits > MAX_DIVISOR:
        shown = digits if digits < 10**20 else "what"
        raise ValueError(
            f"multipleOf: {shown} is over {MAX_DIVISOR}, in digits of the number or of the least common multiple of "
            "those that one value must be a multiple of"
        )
    known[id(part)] = Asked(patterns, digits, places)
    return known[id(part)]


def _divisor(value: Any) -> Asked:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-20 < value < 1e20:
        return Asked()
    number = Decimal(str(value))
    places = max(-int(number.normalize().as_tuple().exponent), 0)
    return Asked(digits=int(number.scaleb(places)), places=places)


def _target(root: Any, ref: Any) -> Any:
    """What a reference inside the schema (RFC 6901) is to; None for none."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    for name in ref.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(name)
        elif isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root
