"""What is asked of one value at the same time, and limits of that.

llguidance bounds what a grammar costs, but for two things: it goes through the states of the automata of a number's
divisors, whose product is their number, and a step of the automata of a text's patterns can take two to the power of
their number.
"""

import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import lcm
from typing import Any, NamedTuple

from aphoton.sampling.schema import resolve

__all__ = ["check_lark", "check_schema"]

MAX_DIVISOR = 100_000
"""States of an automaton that divides: they take 0.5 s."""
MAX_PATTERNS = 8
"""That a text must match."""
MAX_INTERSECTIONS = 3
"""`&` in a Lark grammar."""
MAX_NAMES = 1_000_000
"""Of properties of schemas that come together, counted wherever they do."""
MAX_ROUNDS = 10
"""Of reading a schema that refers to itself, until nothing new is found."""
HUGE = 10**20

MARKS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|<[^>\n]*>|#[^\n]*|(?P<json>%json\s*)|(?P<and>&)')
"""In a Lark grammar; and texts, patterns, comments and special tokens, in which they are none."""


def check_lark(text: str) -> None:
    """:raises ValueError: for a Lark grammar with too many intersections of terminals, or with a JSON schema in which
    too much is asked of a value."""
    at = count = 0
    while match := MARKS.search(text, at):
        at = match.end()
        if match["and"]:
            count += 1
        elif match["json"]:
            try:
                schema, at = json.JSONDecoder().raw_decode(text, at)
            except ValueError as error:
                raise ValueError(f"%json is not followed by JSON: {error}") from None
            check_schema(schema)
    if count > MAX_INTERSECTIONS:
        raise ValueError(f"has {count} intersections (&): there may be {MAX_INTERSECTIONS}")


def check_schema(schema: Any) -> None:
    """:raises ValueError: for a JSON schema in which too much is asked of a value."""
    reading = _Reading(schema)
    for _ in range(MAX_ROUNDS):
        if not reading.find_more():
            return
    raise ValueError("refers to itself in a way that asks more of one value each time")


class Asked(NamedTuple):
    """Of one value: how many patterns it must match, and what it must be a multiple of, ``digits / 10**places``."""

    patterns: int = 0
    digits: int = 1
    places: int = 0


NOTHING = Asked()

SELF, ITEMS, OTHERS = "self", "items", "others"

Asking = dict[str, Asked]
"""What a schema asks of the value it is for, `SELF`, and the most that it asks of any value in its `ITEMS`, in a
property (by ``.name``), and in the `OTHERS`."""


class _Reading:
    """A schema, and all that it refers to.

    In an item or a property it is not told apart how deep in it something is asked: that is never less than what comes
    together there, and may be more.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, Asking] = {}
        self._most: dict[int, Asked] = {}
        self._anchors: dict[str, list[dict[str, Any]]] | None = None
        self._opened: set[int] = set()
        self._read: set[int] = set()
        self._circles = self._news = False
        self._names = 0

    def find_more(self) -> bool:
        """Read it once. Whether there may be more to find.

        :raises ValueError: when too much is asked of a value.
        """
        self._read.clear()
        self._circles = self._news = False
        self._names = 0
        self._asking(self._root)
        return self._circles and self._news

    def _asking(self, part: Any) -> Asking:
        if not isinstance(part, dict):
            return {}
        key = id(part)
        if key in self._opened:
            self._circles = True  # for now it is what was found in the round before
        elif key not in self._read:
            self._opened.add(key)
            asking = self._together([self._own(part), *self._others(part)])
            self._opened.discard(key)
            self._read.add(key)
            self._news = self._news or asking != self._known.get(key)
            self._known[key] = asking
            self._most[key] = _either(asking.values())
        return self._known.get(key, {})

    def _own(self, part: dict[str, Any]) -> Asking:
        """By what the schema says itself."""
        patterns = sum(isinstance(part.get(name), str) for name in ("pattern", "format"))
        matching = self._in(_values(part.get("patternProperties")))
        own = {
            SELF: _together([Asked(patterns), _divisor(part.get("multipleOf"))]),
            ITEMS: self._in(part[name] for name in ("items", "additionalItems", "prefixItems") if name in part),
            OTHERS: _either([matching, self._in([part.get("additionalProperties")])]),
        }
        own = {name: asked for name, asked in own.items() if asked != NOTHING}
        if isinstance(properties := part.get("properties"), dict):
            own |= {f".{name}": _together([self._in([value]), matching]) for name, value in properties.items()}
        return own

    def _others(self, part: dict[str, Any]) -> Iterator[Asking]:
        """By what the schema says that others say of the same value."""
        for one in _values(part.get("allOf")):
            yield self._asking(one)
        for name in ("anyOf", "oneOf"):
            yield self._alternatives([self._asking(one) for one in _values(part.get(name))])
        if isinstance(ref := part.get("$ref"), str):
            target = resolve(self._root, ref)
            for one in self._anchored(ref[1:]) if target is None else [target]:
                yield self._asking(one)

    def _anchored(self, name: str) -> list[dict[str, Any]]:
        if self._anchors is None:
            self._anchors = {}
            for part in _parts(self._root):
                if isinstance(anchor := part.get("$anchor"), str):
                    self._anchors.setdefault(anchor, []).append(part)
        return self._anchors.get(name, [])

    def _in(self, parts: Iterable[Any]) -> Asked:
        """The most that one of the schemas asks of any value."""
        found = []
        for part in parts:
            if isinstance(part, list):
                found.append(self._in(part))
            else:
                self._asking(part)
                found.append(self._most.get(id(part), NOTHING))
        return _either(found)

    def _together(self, askings: Iterable[Asking]) -> Asking:
        every = [asking for asking in askings if asking]
        if len(every) < 2:
            return every[0] if every else {}
        return {name: _together(asked) for name, asked in self._by_name(every)}

    def _alternatives(self, askings: Iterable[Asking]) -> Asking:
        every = [asking for asking in askings if asking]
        if len(every) < 2:
            return every[0] if every else {}
        found = {name: _either(asked) for name, asked in self._by_name(every)}
        if SELF in found:  # alternative numbers are one automaton
            _check_divisors([asking.get(SELF, NOTHING) for asking in every])
        return found

    def _by_name(self, askings: list[Asking]) -> Iterator[tuple[str, list[Asked]]]:
        others = [asking[OTHERS] for asking in askings if OTHERS in asking]
        named: dict[str, list[Asked]] = {}
        for asking in askings:
            self._names += len(asking)
            if self._names > MAX_NAMES:
                raise ValueError("brings too many properties together")
            for name, asked in asking.items():
                named.setdefault(name, []).append(asked)
        for name, found in named.items():
            yield name, found + others if name.startswith(".") else found


def _either(asked: Iterable[Asked]) -> Asked:
    """What is asked of no value together: the most of each."""
    every = [one for one in asked if one != NOTHING]
    if len(every) < 2:
        return every[0] if every else NOTHING
    return Asked(max(one.patterns for one in every), *_common(every))


def _together(asked: Iterable[Asked]) -> Asked:
    """What is asked of one value.

    :raises ValueError: when it is too much.
    """
    every = [one for one in asked if one != NOTHING]
    if len(every) < 2:
        return every[0] if every else NOTHING
    patterns = sum(one.patterns for one in every)
    if patterns > MAX_PATTERNS:
        raise ValueError(f"asks one text to match {patterns} patterns and formats: {MAX_PATTERNS} is the limit")
    _check_divisors(every)
    return Asked(patterns, *_common(every))


def _check_divisors(asked: Iterable[Asked]) -> None:
    """:raises ValueError: when more than one divides, and all of them together have too many states."""
    every = [one for one in asked if one.digits > 1 or one.places > 0]
    digits = _common(every)[0] if len(every) > 1 else 1
    if digits > MAX_DIVISOR:
        raise ValueError(
            f"multipleOf: {digits if digits < HUGE else 'the'} least common multiple of what one value may be a "
            f"multiple of is over {MAX_DIVISOR}"
        )


def _common(asked: list[Asked]) -> tuple[int, int]:
    """The least common multiple, as `Asked.digits` and `Asked.places`."""
    places = max(one.places for one in asked)
    digits = 1
    for one in asked:
        if one.digits > 1 or one.places > 0:
            digits = min(lcm(digits, one.digits * 10 ** (places - one.places)), HUGE)
    return digits, places


def _divisor(value: Any) -> Asked:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-20 < value < 1e20:
        return NOTHING
    number = Decimal(str(value))
    places = max(-int(number.normalize().as_tuple().exponent), 0)
    digits = int(number.scaleb(places))
    if digits > MAX_DIVISOR:
        raise ValueError(f"multipleOf: {value} is over {MAX_DIVISOR}, in digits of the number")
    return Asked(digits=digits, places=places)


def _values(part: Any) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Whatever may be a schema in one."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        waiting += _values(part)
        if isinstance(part, dict):
            yield part
