"""What is asked of one value at the same time."""

from typing import Any

import pytest

from aphoton.sampling.intersections import check_intersections, check_lark_intersections

PATTERN = {"pattern": "a"}
PATTERNS = [{"pattern": char} for char in "abcdefghi"]


TWO = (9973, 9967)


def integer(divisor: float, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": divisor, **more}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"multipleOf": 100_000},
        {"multipleOf": 0.00001},
        {"multipleOf": 0.5, "allOf": [{"multipleOf": 3_000}]},
        {"properties": {"a": integer(9973), "b": integer(9967)}},
        {"prefixItems": [integer(9973), integer(9967)], "items": integer(9949)},
        {"anyOf": [{"properties": {"a": integer(divisor)}} for divisor in TWO]},
        {"const": {"multipleOf": 3_600_000}, "default": {"allOf": PATTERNS}},
        {"allOf": PATTERNS[:8]},
        {"allOf": [PATTERN] * 50},
        {"multipleOf": 3_000_000},
        {"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 5_000}]},
        {"patternProperties": {str(i): {} for i in range(64)}},
        {"anyOf": [PATTERN] * 50},
        {"properties": dict.fromkeys("abcdefghijkl", PATTERN)},
        {"allOf": [{"properties": {name: PATTERN}} for name in "abcdefghijkl"]},
        {"anyOf": [{"properties": {"a": PATTERN}} for _ in range(50)], "properties": {"a": PATTERN}},
        {"$ref": "#/x/1", "x": [0, {"anyOf": 7, "multipleOf": "x"}]},
        # Bases that are inherited by more than one way, and say it again.
        {"allOf": [{"allOf": [{"properties": {"id": PATTERN, "x": one}}, {}]} for one in PATTERNS[:8]]},
        {"allOf": [{"properties": {"data": {"properties": {str(i): PATTERN}}}} for i in range(20)]},
        {"allOf": [{"properties": {str(i): PATTERN}, "additionalProperties": {"format": "uri"}} for i in range(20)]},
        {"pattern": "a", "additionalProperties": {"$ref": "#"}},
        # A tree of things that have a name.
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "named": {"properties": {"name": PATTERN, "id": PATTERN}},
                "node": {
                    "allOf": [{"$ref": "#/$defs/named"}, {"properties": {"of": {"items": {"$ref": "#/$defs/node"}}}}]
                },
            },
        },
    ],
)
def test_schemas(schema: Any) -> None:
    check_intersections(schema)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"x": {"items": {"multipleOf": 223092870}}}}, "multipleOf: 223092870 is over"),
        ({"multipleOf": 1234.567}, "multipleOf"),
        ({"allOf": [integer(divisor) for divisor in TWO]}, "multipleOf: the least common multiple"),
        ({"anyOf": [integer(divisor) for divisor in TWO]}, "multipleOf"),
        ({"allOf": [integer(divisor) for divisor in (*TWO, 9949, 9941, 9931, 9929)]}, "multipleOf: the least"),
        ({"multipleOf": 0.07, "allOf": [{"multipleOf": 99_991}]}, "multipleOf"),
        ({"multipleOf": 70, "$ref": "#/$defs/a~1b", "$defs": {"a/b": {"multipleOf": 99_991}}}, "multipleOf"),
        (integer(9973, **{"$ref": "#/%24defs/a", "$defs": {"a": integer(9967)}}), "multipleOf"),
        (integer(9973, **{"$ref": "#q", "x": [{"$anchor": "q", "multipleOf": 9967}]}), "multipleOf"),
        ({"allOf": [{"properties": {"a": integer(divisor)}} for divisor in TWO]}, "multipleOf"),
        ({"allOf": [{"properties": {"a": {"items": integer(divisor)}}} for divisor in TWO]}, "multipleOf"),
        ({"allOf": [{"items": integer(divisor)} for divisor in TWO]}, "multipleOf"),
        ({"allOf": [{"prefixItems": [integer(9973)]}, {"items": integer(9967)}]}, "multipleOf"),
        ({"properties": {"a": integer(9973)}, "patternProperties": {"^a": integer(9967)}}, "multipleOf"),
        ({"properties": {"a": integer(9973)}, "allOf": [{"additionalProperties": integer(9967)}]}, "multipleOf"),
        (
            {"anyOf": [{"properties": {"a": integer(9973)}}, {}], "oneOf": [{"properties": {"a": integer(9967)}}]},
            "mult",
        ),
        ({"allOf": PATTERNS}, "9 patterns"),
        ({"allOf": [{"items": one} for one in PATTERNS]}, "9 patterns"),
        ({"anyOf": [PATTERN, {"allOf": [PATTERN, {"allOf": PATTERNS[1:8]}], "format": "date"}]}, "9 patterns"),
        ({"$ref": "#/x", "allOf": PATTERNS[:5], "x": {"allOf": PATTERNS[5:]}}, "9 patterns"),
        # Found in the second round only: what `a` asks of its own `a` is not known when `b` is read.
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"pattern": "a", "properties": {"a": {"$ref": "#/$defs/b"}}},
                    "b": {"properties": {"b": {"allOf": [{"$ref": "#/$defs/a"}, *PATTERNS[1:]]}}},
                },
            },
            "9 patterns",
        ),
        ({"$ref": "#/$defs%2Fa", "multipleOf": 9973, "$defs": {"a": integer(9967)}}, "multipleOf"),
        ({"$ref": "#%71", "multipleOf": 9973, "x": {"$anchor": "q", "multipleOf": 9967}}, "multipleOf"),
        (
            {"$ref": "#q", "multipleOf": 9973, "y": {"$anchor": "q"}, "x": {"id": "#q", "multipleOf": 9967}},
            "multipleOf",
        ),
        ({"$ref": "#/prefixItems/+0", "multipleOf": 9973, "prefixItems": [integer(9967)]}, "names nothing"),
        ({"$ref": "http://a/b"}, "names nothing"),
        ({"properties": {str(i): integer(9973 + 2 * i) for i in range(25)}}, "multipleOf: the sum of all"),
        ({"properties": {"a": {"patternProperties": {str(i): {} for i in range(65)}}}}, "65 patternProperties"),
    ],
)
def test_too_much(schema: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_intersections(schema)


def test_what_is_referred_to_twice_is_looked_at_once() -> None:
    """Else this took two to the power of forty."""
    parts: dict[str, Any] = {str(i): {"allOf": [{"$ref": f"#/{i + 1}"}] * 2} for i in range(40)}
    check_intersections({"$ref": "#/0", **parts, "40": {"multipleOf": 7}})
    check_intersections({"$ref": "#/0", **parts, "40": PATTERN})


def test_many_that_bring_many_together() -> None:
    many = {"properties": {str(i): PATTERN for i in range(4_000)}}
    parts = {f"p{i}": {"$ref": "#/$defs/many", "properties": {"x": PATTERN}} for i in range(4_000)}
    with pytest.raises(ValueError, match="too many properties"):
        check_intersections({"properties": parts, "$defs": {"many": many}})


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ('start: /a&b&c&d&e/ "&&&&&" // &&&&&', True),
        ("start: A\nA: /a/ & /b/ & /c/ & /d/ & /e/ & /f/ & /g/ & /h/", True),
        ("start: A\nA: /a/ & /b/ & /f/ & /g/ & B\nB: /c/ & /d/ & /e/ & /h/ & /i/ & /j/", False),
        ("start: A\nA: /a\n/ & /b/ & /c/ & /d/ & /e/ & /f/ & /g/ & /h/ & /i\n/", False),
        ("# a & b & c & d & e & & & & &\nstart: <|a&b&c&d&e&&&&|>", True),
        ("start: <a#b> A\nA: /a/ & /b/ & /c/ & /d/ & /e/ & /f/ & /g/ & /h/ & /i/", False),
        ('start: %json {"pattern": "&&&&&&&&&\\"&&"} | "a"', True),
    ],
)
def test_lark(grammar: str, fits: bool) -> None:
    if fits:
        check_lark_intersections(grammar)
    else:
        with pytest.raises(ValueError, match="intersections"):
            check_lark_intersections(grammar)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ('{"multipleOf": 9999991}', "multipleOf"),
        (
            '{"multipleOf": 98009} | %json {"multipleOf": 98011} | %json {"multipleOf": 98013}',
            "multipleOf: the sum of all",
        ),
        ('{"allOf": [1, ', "not followed by JSON"),
    ],
)
def test_a_schema_in_lark(schema: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_lark_intersections(f'start: "//" %json {schema}')


@pytest.mark.parametrize("text", ["/", "/\\", '"\\', "<"])
def test_what_is_not_closed_is_looked_at_once(text: str) -> None:
    """Else each of these took an hour."""
    check_lark_intersections("start: " + text * 1_000_000)
