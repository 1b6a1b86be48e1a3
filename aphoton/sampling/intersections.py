"""What must hold of one value at the same time, which has its price in the square and the cube: limits of that.

llguidance bounds what a grammar costs, but for the search of a first text that all conditions allow: that goes through
the product of their automata, and cannot be stopped.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from math import lcm
from typing import Any

__all__ = ["check_lark", "check_schema"]

MAX_DIVISOR, MAX_PATTERNS = 100_000, 4
"""States of an automaton that divides, which takes 0.2 s; and patterns that a text must match."""

PATTERNS = ("pattern", "format")
QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')


def check_schema(schema: Any) -> None:
    """:raises ValueError: for a JSON schema with a value that too much is asked of."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += part.values()
            patterns = _patterns(part, schema, frozenset())
            if patterns > MAX_PATTERNS:
                raise ValueError(f"asks one text to match {patterns} patterns and formats: {MAX_PATTERNS} is the limit")
            _check_divisors([divisor for one in _together(part, schema) for divisor in _divisors(one)])


def check_lark(text: str) -> None:
    """:raises ValueError: for a Lark grammar with too many intersections of terminals."""
    if (count := QUOTED.sub("", text).count("&")) >= MAX_PATTERNS:
        raise ValueError(f"has {count} intersections (&): there may be {MAX_PATTERNS - 1}")


def _patterns(part: Any, root: Any, above: frozenset[int]) -> int:
    """How many a text must match; of alternatives, those of the one with most."""
    if not isinstance(part, dict) or id(part) in above:
        return 0
    above |= {id(part)}
    count = sum(name in part for name in PATTERNS)
    if isinstance(every := part.get("allOf"), list):
        count += sum(_patterns(one, root, above) for one in every)
    for name in ("anyOf", "oneOf"):
        if isinstance(some := part.get(name), list):
            count += max((_patterns(one, root, above) for one in some), default=0)
    return count + _patterns(_target(root, part.get("$ref")), root, above)


def _check_divisors(divisors: list[Decimal]) -> None:
    places = max((-int(divisor.as_tuple().exponent) for divisor in divisors), default=0)
    if divisors and lcm(*(int(divisor.scaleb(max(places, 0))) for divisor in divisors)) > MAX_DIVISOR:
        asked = " and ".join(f"{divisor:f}" for divisor in divisors[:5])
        raise ValueError(
            f"multipleOf {asked}: its digits, or those of the least common multiple, are over {MAX_DIVISOR}"
        )


def _divisors(part: dict[str, Any]) -> Iterator[Decimal]:
    value = part.get("multipleOf")
    if isinstance(value, int | float) and not isinstance(value, bool) and 1e-20 < value < 1e20:
        yield Decimal(str(value)).normalize()


def _together(part: Any, root: Any) -> Iterator[dict[str, Any]]:
    """The schemas that must hold of the same value as ``part``, itself the first; alternatives count as if all did."""
    left, seen = [part], set[int]()
    while left:
        part = left.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for name in ("allOf", "anyOf", "oneOf"):
            if isinstance(part.get(name), list):
                left += part[name]
        left.append(_target(root, part.get("$ref")))


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
