"""What is asked of one value at the same time, and limits of that.

llguidance bounds what a grammar costs, but for some things: it goes through the states of the automata of a number's
divisors, whose product is their number; a step of the automata of a text's patterns can take two to the power of their
number; and it compares the patterns of properties with each other.
"""

import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import lcm
from typing import Any, NamedTuple
from urllib.parse import unquote

from aphoton.sampling.schema import lark_schemas, resolve

__all__ = ["check_intersections", "check_lark_intersections"]

MAX_DIVISOR = 100_000
"""States of an automaton that divides: they take 0.5 s."""
MAX_DIVISORS = 200_000
"""The same of all together."""
MAX_PATTERNS = 8
"""That a text must match."""
MAX_INTERSECTIONS = MAX_PATTERNS - 1
"""`&` in a Lark grammar."""
MAX_TEXTS = 64
"""Of different patterns that are told apart."""
MAX_NAMED = 64
"""``patternProperties``: a hundred took 3 s."""
MAX_NAMES = 300_000
"""Of properties of schemas that come together, counted wherever they do."""
MAX_ROUNDS = 10
"""Of reading a schema that refers to itself, until nothing new is found."""
HUGE = 10**40 + 1

MARKS = re.compile(
    r'"(?:\\.|[^"\\])*+"?|//[^\n]*|/(?:\\.|[^/\\])*+/?|#[^\n]*|<[^<>\s]*>?|(?P<json>%json\s*)|(?P<and>&)', re.DOTALL
)
"""In a Lark grammar; and texts, patterns, comments and special tokens, in which they are none. Each of those matches,
closed or not, so that nothing is looked at twice."""


def check_lark_intersections(text: str) -> None:
    """:raises ValueError: for a Lark grammar with too many intersections of terminals, or with a JSON schema in which
    too much is asked of a value."""
    at = count = 0
    while match := MARKS.search(text, at):
        at = match.end()
        if match["and"]:
            count += 1
        elif match["json"]:
            try:
                _, at = json.JSONDecoder().raw_decode(text, at)
            except ValueError as error:
                raise ValueError(f"%json is not followed by JSON: {error}") from None
    if count > MAX_INTERSECTIONS:
        raise ValueError(f"has {count} intersections (&): there may be {MAX_INTERSECTIONS}")
    _check(lark_schemas(text))


def check_intersections(schema: Any) -> None:
    """:raises ValueError: for a JSON schema in which too much is asked of a value."""
    _check([schema])


def _check(schemas: Iterable[Any]) -> None:
    divisors: set[int] = set()
    named = 0
    for schema in schemas:
        reading = _Reading(schema)
        if all(reading.find_more() for _ in range(MAX_ROUNDS)):
            raise ValueError("refers to itself in a way that asks more of one value each time")
        divisors |= reading.divisors
        named += sum(len(list(_values(part.get("patternProperties")))) for part in _parts(schema))
    if sum(divisors) > MAX_DIVISORS:
        raise ValueError(
            f"multipleOf: the sum of all, without the point and the zeros at the end of each, is over {MAX_DIVISORS}"
        )
    if named > MAX_NAMED:
        raise ValueError(f"has {named} patternProperties: {MAX_NAMED} is the limit")


class Asked(NamedTuple):
    """Of one value.

    :ivar patterns: how many it must match, at most.
    :ivar texts: those, and all that it may have to match instead; None: too many to tell apart.
    :ivar digits: it must be a multiple of ``digits / 10**places``.
    """

    patterns: int = 0
    texts: frozenset[str] | None = frozenset()
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
        self.divisors: set[int] = set()
        """States of the automaton of each number that divides."""

    def find_more(self) -> bool:
        """Read it once. Whether there may be more to find.

        :raises ValueError: when too much is asked of a value.
        """
        self._read.clear()
        self._circles = self._news = False
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
            asking = self._together([self._own(part), *self._elsewhere(part)])
            self._opened.discard(key)
            self._read.add(key)
            self._news = self._news or asking != self._known.get(key)
            self._known[key] = asking
            self._most[key] = _either(asking.values())
        return self._known.get(key, {})

    def _own(self, part: dict[str, Any]) -> Asking:
        """By what the schema says itself."""
        texts = frozenset(f"{name} {part[name]}" for name in ("pattern", "format") if isinstance(part.get(name), str))
        matching = self._in(_values(part.get("patternProperties")))
        own = {
            SELF: _together([Asked(len(texts), texts), self._divisor(part.get("multipleOf"))]),
            ITEMS: self._in(part[name] for name in ("items", "additionalItems", "prefixItems") if name in part),
            OTHERS: _either([matching, self._in([part.get("additionalProperties")])]),
        }
        if isinstance(properties := part.get("properties"), dict):
            own |= {f".{name}": _together([self._in([value]), matching]) for name, value in properties.items()}
        return {name: asked for name, asked in own.items() if asked != NOTHING}

    def _divisor(self, value: Any) -> Asked:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-20 < value < 1e20:
            return NOTHING
        number = Decimal(str(value))
        places = max(-int(number.normalize().as_tuple().exponent), 0)
        digits = int(number.scaleb(places))
        if (states := _states(digits)) > MAX_DIVISOR:
            raise ValueError(f"multipleOf: {value} is over {MAX_DIVISOR} without its point and the zeros at its end")
        self.divisors.add(states)
        return Asked(digits=digits, places=places)

    def _elsewhere(self, part: dict[str, Any]) -> Iterator[Asking]:
        """By what the schema says that others say of the same value."""
        for one in _values(part.get("allOf")):
            yield self._asking(one)
        for name in ("anyOf", "oneOf"):
            yield self._alternatives([self._asking(one) for one in _values(part.get(name))])
        if isinstance(ref := part.get("$ref"), str):
            target = resolve(self._root, ref)
            targets = self._anchored(unquote(ref[1:])) if target is None else [target]
            if not all(isinstance(one, dict | bool) for one in targets or [None]):
                raise ValueError(f"keyword $ref names nothing in the schema: {ref!r:.200}")
            yield from map(self._asking, targets)

    def _anchored(self, name: str) -> list[dict[str, Any]]:
        if self._anchors is None:
            self._anchors = {}
            for part in _parts(self._root):
                for anchor in (part.get("$anchor"), part.get("id")):  # the latter with a # in draft 4
                    if isinstance(anchor, str):
                        self._anchors.setdefault(anchor.removeprefix("#"), []).append(part)
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
    return Asked(max(one.patterns for one in every), _texts(every), *_common(every))


def _together(asked: Iterable[Asked]) -> Asked:
    """What is asked of one value.

    :raises ValueError: when it is too much.
    """
    every = [one for one in asked if one != NOTHING]
    if len(every) < 2:
        return every[0] if every else NOTHING
    patterns, texts = sum(one.patterns for one in every), _texts(every)
    if texts is not None:
        patterns = min(patterns, len(texts))  # the same again is nothing more
    if patterns > MAX_PATTERNS:
        raise ValueError(f"asks one text to match {patterns} patterns and formats: {MAX_PATTERNS} is the limit")
    _check_divisors(every)
    return Asked(patterns, texts, *_common(every))


def _texts(asked: list[Asked]) -> frozenset[str] | None:
    texts: frozenset[str] = frozenset()
    for one in asked:
        if one.texts is None or len(texts := texts | one.texts) > MAX_TEXTS:
            return None
    return texts


def _check_divisors(asked: Iterable[Asked]) -> None:
    """:raises ValueError: when more than one divides, and all of them together have too many states."""
    every = [one for one in asked if one.digits > 1 or one.places > 0]
    if len(every) > 1 and _states(_common(every)[0]) > MAX_DIVISOR:
        raise ValueError(
            "multipleOf: the least common multiple of those for one value is over "
            f"{MAX_DIVISOR} without its point and the zeros at its end"
        )


def _common(asked: list[Asked]) -> tuple[int, int]:
    """The least common multiple, as `Asked.digits` and `Asked.places`."""
    places = max(one.places for one in asked)
    digits = 1
    for one in asked:
        if one.digits > 1 or one.places > 0:
            digits = min(lcm(digits, one.digits * 10 ** (places - one.places)), HUGE)
    return digits, places


def _states(digits: int) -> int:
    """Of the automaton that divides by them: zeros at the end cost next to nothing."""
    while digits % 10 == 0:
        digits //= 10
    return digits


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
