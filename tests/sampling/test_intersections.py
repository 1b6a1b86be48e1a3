"""What is asked of one value at the same time."""

from typing import Any

import pytest

from aphoton.sampling.intersections import check_lark, check_schema

PATTERN = {"pattern": "a"}


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        (True, None),
        ({"multipleOf": 100_000}, None),
        ({"multipleOf": 0.00001}, None),
        ({"properties": {"x": {"items": {"multipleOf": 223092870}}}}, "multipleOf"),
        ({"multipleOf": 1234.567}, "multipleOf"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf: 99400891 is over"),
        ({"multipleOf": 0.5, "allOf": [{"multipleOf": 3_000}]}, None),
        ({"multipleOf": 0.05, "allOf": [{"multipleOf": 30_000}]}, "multipleOf"),
        ({"multipleOf": 70, "$ref": "#/$defs/a~1b", "$defs": {"a/b": {"multipleOf": 99_991}}}, "multipleOf"),
        ({"allOf": [PATTERN] * 4}, None),
        ({"allOf": [PATTERN] * 5}, "5 patterns"),
        ({"anyOf": [PATTERN] * 50}, None),
        ({"anyOf": [PATTERN, {"allOf": [PATTERN, {"allOf": [PATTERN] * 3}], "format": "date"}]}, "5 patterns"),
        ({"properties": dict.fromkeys("abcdefgh", PATTERN)}, None),
        ({"$ref": "#", "pattern": "a"}, None),
        ({"$ref": "#/x", "allOf": [PATTERN] * 3, "x": {"allOf": [PATTERN] * 2}}, "5 patterns"),
        ({"$ref": "#/x/1", "x": [0, {"anyOf": 7, "multipleOf": "x"}]}, None),
        ({"$ref": "http://a/b", "multipleOf": True}, None),
    ],
)
def test_schemas(schema: Any, refused: str | None) -> None:
    if refused is None:
        check_schema(schema)
    else:
        with pytest.raises(ValueError, match=refused):
            check_schema(schema)


def test_what_is_referred_to_twice_is_looked_at_once() -> None:
    """Else this took two to the power of forty."""
    parts: dict[str, Any] = {str(i): {"allOf": [{"$ref": f"#/{i + 1}"}] * 2} for i in range(40)}
    check_schema({"$ref": "#/0", **parts, "40": {"multipleOf": 7}})
    with pytest.raises(ValueError, match="asks one text to match 8 patterns"):
        check_schema({"$ref": "#/0", **parts, "40": PATTERN})


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ('start: /a&b&c&d&e/ "&&&&&" // &&&&&', True),
        ("start: A\nA: /a/ & /b/ & /c/ & /d/", True),
        ("start: A\nA: /a/ & /b/ & B\nB: /c/ & /d/ & /e/", False),
    ],
)
def test_lark(grammar: str, fits: bool) -> None:
    if fits:
        check_lark(grammar)
    else:
        with pytest.raises(ValueError, match="intersections"):
            check_lark(grammar)
