"""What is asked of one value at the same time."""

from typing import Any

import pytest

from aphoton.sampling.intersections import check_lark, check_schema

PATTERN = {"pattern": "a"}


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
        {"const": {"multipleOf": 3_600_000}, "default": {"allOf": [PATTERN] * 9}},
        {"allOf": [PATTERN] * 8},
        {"anyOf": [PATTERN] * 50},
        {"properties": dict.fromkeys("abcdefghijkl", PATTERN)},
        {"allOf": [{"properties": {name: PATTERN}} for name in "abcdefghijkl"]},
        {"anyOf": [{"properties": {"a": PATTERN}} for _ in range(50)], "properties": {"a": PATTERN}},
        {"$ref": "#/x/1", "x": [0, {"anyOf": 7, "multipleOf": "x"}]},
        {"$ref": "http://a/b", "multipleOf": True},
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
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"x": {"items": {"multipleOf": 223092870}}}}, "multipleOf: 223092870 is over"),
        ({"multipleOf": 1234.567}, "multipleOf"),
        ({"allOf": [integer(divisor) for divisor in TWO]}, "multipleOf: 99400891 least common multiple"),
        ({"anyOf": [integer(divisor) for divisor in TWO]}, "multipleOf: 99400891"),
        ({"allOf": [integer(divisor) for divisor in (*TWO, 9949, 9941, 9931, 9929)]}, "multipleOf: the least"),
        ({"multipleOf": 0.05, "allOf": [{"multipleOf": 30_000}]}, "multipleOf"),
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
        ({"allOf": [PATTERN] * 9}, "9 patterns"),
        ({"allOf": [{"items": PATTERN}] * 9}, "9 patterns"),
        ({"anyOf": [PATTERN, {"allOf": [PATTERN, {"allOf": [PATTERN] * 7}], "format": "date"}]}, "9 patterns"),
        ({"$ref": "#/x", "allOf": [PATTERN] * 5, "x": {"allOf": [PATTERN] * 4}}, "9 patterns"),
        # Found in the second round only: what `a` asks of its own `a` is not known when `b` is read.
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"pattern": "a", "properties": {"a": {"$ref": "#/$defs/b"}}},
                    "b": {"properties": {"b": {"allOf": [{"$ref": "#/$defs/a"}] * 9}}},
                },
            },
            "9 patterns",
        ),
        ({"$ref": "#", "multipleOf": 7, "pattern": "a"}, "9 patterns"),
    ],
)
def test_too_much(schema: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_schema(schema)


def test_what_is_referred_to_twice_is_looked_at_once() -> None:
    """Else this took two to the power of forty."""
    parts: dict[str, Any] = {str(i): {"allOf": [{"$ref": f"#/{i + 1}"}] * 2} for i in range(40)}
    check_schema({"$ref": "#/0", **parts, "40": {"multipleOf": 7}})
    with pytest.raises(ValueError, match="asks one text to match 16 patterns"):
        check_schema({"$ref": "#/0", **parts, "40": PATTERN})


def test_many_that_bring_many_together() -> None:
    many = {"properties": {str(i): {} for i in range(4_000)}}
    parts = {f"p{i}": {"$ref": "#/$defs/many", "properties": {"x": {}}} for i in range(4_000)}
    with pytest.raises(ValueError, match="too many properties"):
        check_schema({"properties": parts, "$defs": {"many": many}})


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ('start: /a&b&c&d&e/ "&&&&&" // &&&&&', True),
        ("start: A\nA: /a/ & /b/ & /c/ & /d/", True),
        ("start: A\nA: /a/ & /b/ & B\nB: /c/ & /d/ & /e/", False),
        ("# a & b & c & d & e\nstart: <|a&b&c&d&e|>", True),
        ("start: <a#b> A\nA: /a/ & /b/ & /c/ & /d/ & /e/", False),
        ('start: %json {"pattern": "&&&&&\\"&&"} | "a"', True),
    ],
)
def test_lark(grammar: str, fits: bool) -> None:
    if fits:
        check_lark(grammar)
    else:
        with pytest.raises(ValueError, match="intersections"):
            check_lark(grammar)


@pytest.mark.parametrize(
    ("schema", "why"), [('{"multipleOf": 9999991}', "multipleOf"), ('{"allOf": [1, ', "not followed by JSON")]
)
def test_a_schema_in_lark(schema: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_lark(f'start: "//" %json {schema}')
