"""`Grammar`: what a request may say, what is refused, and what a text becomes."""

import dataclasses
import datetime
import json
import typing
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from aphoton.errors import InvalidRequest
from aphoton.sampling import Grammar
from aphoton.sampling.moments import schema_with_moments
from aphoton.sampling.schema import FORMATS, check_depth


class Point(msgspec.Struct):
    x: int
    label: str = "none"


@dataclasses.dataclass
class Place:
    name: str
    at: list[float]


class Named(typing.TypedDict):
    name: str


class Person(pydantic.BaseModel):
    name: str
    age: int

    @pydantic.field_validator("age")
    @classmethod
    def old_enough(cls, age: int) -> int:
        if age < 18:
            raise ValueError("too young")
        return age


def grammar(**fields: Any) -> Grammar:
    made = Grammar.of(**fields)
    assert made is not None
    return made


def test_nothing_asked_is_no_grammar() -> None:
    assert Grammar.of() is None
    assert Grammar.of(json_object=False) is None


def test_equal_requests_are_equal_and_hashable() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    one, two = grammar(json_schema=schema), grammar(json_schema=json.loads(json.dumps(schema)))
    assert one == two and hash(one) == hash(two)
    assert hash(grammar(json_schema=list[int])) == hash(grammar(json_schema=list[int]))
    assert grammar(regex="a") != grammar(choices=["a"])


def test_a_later_change_of_the_schema_changes_nothing() -> None:
    schema: dict[str, Any] = {"type": "string"}
    made = grammar(json_schema=schema)
    schema["type"] = "integer"
    assert json.loads(made.text) == {"type": "string"}


def test_keys_keep_their_order() -> None:
    text = grammar(json_schema={"type": "object", "properties": {"z": {}, "a": {}}}).text
    assert text.index('"z"') < text.index('"a"')


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"json_object": 1}, "json_object", "true or false"),
        ({"json_object": True, "regex": "a"}, "regex", "combined with json_object"),
        ({"json_schema": {}, "choices": ["a"]}, "choices", "combined with json_schema"),
        ({"json_schema": "int"}, "json_schema", "a dict or a type"),
        ({"json_schema": True}, "json_schema", "a dict or a type"),
        ({"json_schema": [1]}, "json_schema", "a dict or a type"),
        ({"json_schema": object}, "json_schema", "cannot be made from"),
        ({"json_schema": {"const": object()}}, "json_schema", "JSON"),
        ({"json_schema": {"const": float("nan")}}, "json_schema", "JSON"),
        ({"json_schema": {"enum": ["\ud800"]}}, "json_schema", "lone surrogate"),
        ({"json_schema": {"description": "x" * 300_000}}, "json_schema", "at most 262144"),
        ({"json_schema": {"x-guidance": {"lenient": True}}}, "json_schema", "x-guidance"),
        ({"json_schema": {"$ref": "https://example.com/a.json"}}, "json_schema", r"\$ref .*example\.com"),
        ({"json_schema": {"items": {"$ref": "file:///etc/passwd"}}}, "json_schema", r"\$ref"),
        ({"json_schema": {"$defs": {"a": {"$id": "b"}}}}, "json_schema", r"\$id"),
        ({"regex": ""}, "regex", "not empty"),
        ({"regex": 3}, "regex", "a string"),
        ({"regex": "a" * 300_000}, "regex", "at most 262144"),
        ({"choices": "ab"}, "choices", "list of strings"),
        ({"choices": []}, "choices", "at least one"),
        ({"choices": ["a", ""]}, "choices", "none of them empty"),
        ({"choices": ["a", 1]}, "choices", "string"),
        ({"choices": ["a", "b", "a"]}, "choices", "'a' is there twice"),
        ({"choices": ["\udcff"]}, "choices", "lone surrogate"),
        ({"grammar": ""}, "grammar", "not empty"),
        ({"grammar": "start: " + "x " * 40_000}, "grammar", "at most 32768"),
        (
            {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(1500))},
            "grammar",
            "at most 1000 rules",
        ),
        ({"grammar": "start: x\nx[max_tokens=3, temperature=0.5]: /a+/"}, "grammar", "attribute temperature"),
        ({"grammar": "start: x\n  x[ capture ]: /a+/"}, "grammar", "attribute capture"),
        ({"grammar": 'start: x "b"\nx[stop=""]: /a+/'}, "grammar", 'attribute stop=""'),
        ({"grammar": 'start: %json {"$ref": "https://example.com"}'}, "grammar", r"\$ref"),
    ],
    ids=lambda value: f"{value!r:.50}",
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        Grammar.of(**fields)
    assert refused.value.field == field


def chain(length: int, link: typing.Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    defs = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        chain(5000, lambda ref: {"$ref": ref}),
        chain(500, lambda ref: {"properties": {"x": {"$ref": ref}}}),
        chain(500, lambda ref: {"anyOf": [{"$ref": ref}, {"$ref": "#"}]}),
        chain(500, lambda ref: {"$ref": ref.replace("d", "%64")}),
        {"$ref": "#a0", "$defs": {f"d{i}": {"$anchor": f"a{i}", "items": {"$ref": f"#a{i + 1}"}} for i in range(500)}},
        nested(500),
    ],
    ids=["references", "properties", "circles", "escapes", "anchors", "nested"],
)
def test_depth_is_limited(schema: dict[str, Any]) -> None:
    """The compiler would overflow its stack, and end the process."""
    with pytest.raises(InvalidRequest, match="nested at most 400"):
        Grammar.of(json_schema=schema)


def test_a_schema_that_holds_itself() -> None:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    with pytest.raises(InvalidRequest, match="Circular reference"):
        Grammar.of(json_schema=schema)


def test_tuples_hide_nothing() -> None:
    with pytest.raises(InvalidRequest, match=r"\$ref is supported inside"):
        Grammar.of(json_schema={"anyOf": ({"type": "string"}, {"$ref": "https://example.com"})})


@pytest.mark.parametrize("inside", [{}, {"items": {"$ref": "#"}}], ids=["tree", "circle"])
def test_one_subschema_by_many_names_is_looked_at_once(inside: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spelt in all ways there are of escaping ten letters: it took minutes."""
    names = ["".join(f"%{ord(c):x}" if i >> bit & 1 else c for bit, c in enumerate("abcdefghij")) for i in range(1024)]
    target = {"enum": [[i] for i in range(300)], **inside}
    looked = 0

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            nonlocal looked
            looked += 1
            return super().__iter__()

    target["enum"] = Counted(target["enum"])
    schema = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": {"abcdefghij": target}}
    try:
        check_depth(schema, "json_schema")
    except InvalidRequest:
        assert inside  # each name counts: the compiler follows each by itself
    assert 0 < looked <= 2


def test_deep_but_allowed() -> None:
    assert Grammar.of(json_schema=chain(100, lambda ref: {"properties": {"x": {"$ref": ref}}}))
    # References that look like more than they are: every one of 300 leads to the same.
    same = {"properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(300)}, "$defs": {"a": {"type": "string"}}}
    assert Grammar.of(json_schema=same)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Point, '{"x":1,"label":"a"}', Point(1, "a")),
        (Point, '{"x":1}', Point(1)),
        (Place, '{"name":"a","at":[1,2.5]}', Place("a", [1.0, 2.5])),
        (Named, '{"name":"b"}', {"name": "b"}),
        (Person, '{"name":"c","age":20}', Person(name="c", age=20)),
        (list[int], "[1,2]", [1, 2]),
        (set[int], "[1,2,1]", {1, 2}),
        (float, "1e999", float("inf")),
        (datetime.date, '"2024-02-29"', datetime.date(2024, 2, 29)),
        (bytes, '"aGk="', b"hi"),
        ({"type": "object"}, '{"a":[1,null]}', {"a": [1, None]}),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_json_becomes_an_object(kind: Any, text: str, value: Any) -> None:
    made = grammar(json_schema=kind).parse(text)
    assert made == value and type(made) is type(value)


def test_other_texts_stay_texts() -> None:
    assert grammar(json_object=True).parse('{"a":1}') == {"a": 1}
    for fields in ({"regex": "[0-9]+"}, {"choices": ["12", "x"]}, {"grammar": 'start: "12"'}):
        assert grammar(**fields).parse("12") == "12"


def test_what_was_cut_is_nothing() -> None:
    assert grammar(regex="[0-9]+").parse("1", complete=False) is None
    assert grammar(json_schema=Point).parse('{"x":1}', complete=False) is None
    assert grammar(json_schema=Point).parse('{"x":') is None


def test_what_a_type_raises_is_a_value_error() -> None:
    class Wrong:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "integer"}

        @staticmethod
        def model_validate_json(text: str) -> None:
            raise KeyError(text)

    with pytest.raises(ValueError, match="Wrong cannot be made"):
        grammar(json_schema=Wrong).parse("1")


@pytest.mark.parametrize("schema", [None, [], True, "{}"])
def test_a_type_whose_schema_is_none(schema: Any) -> None:
    kind = type("Kind", (), {"model_json_schema": staticmethod(lambda: schema)})
    with pytest.raises(InvalidRequest, match=r"^json_schema: of .* must be a dict"):
        Grammar.of(json_schema=kind)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Person, '{"name":"c","age":2}'), (datetime.date, '"2023-02-29"'), (list[int], "[" * 100_000 + "]" * 100_000)],
    ids=["validator", "date", "deep"],
)
def test_what_a_type_refuses(kind: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be made|nested too deeply"):
        grammar(json_schema=kind).parse(text)


def tagged(**change: Any) -> dict[str, Any]:
    def alternative(tag: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": tag}, "n": {}}, "required": ["n", "kind"], **change}

    return {"oneOf": [alternative("a"), {"$ref": "#/$defs/b"}], "$defs": {"b": alternative("b")}}


def test_alternatives_with_a_tag_exclude_each_other() -> None:
    made = json.loads(grammar(json_schema={**tagged(), "discriminator": {"propertyName": "kind"}}).text)
    assert made == {"anyOf": tagged()["oneOf"], "$defs": tagged()["$defs"]}


@pytest.mark.parametrize(
    "change",
    [
        {"required": ["n"]},
        {"properties": {"kind": {"const": "same"}, "n": {}}},
        {"properties": {"kind": {"type": "string"}, "n": {}}},
        {"type": ["object", "null"]},
    ],
    ids=["optional", "same", "any", "null"],
)
def test_without_a_tag_one_of_stays(change: dict[str, Any]) -> None:
    assert json.loads(grammar(json_schema=tagged(**change)).text) == tagged(**change)


ANY = Annotated[datetime.datetime, msgspec.Meta(description="any")]
NAIVE = Annotated[datetime.datetime, msgspec.Meta(tz=False)]
NAIVE_CLOCK = Annotated[datetime.time, msgspec.Meta(tz=False)]


class Moments(msgspec.Struct):
    a: "ANY | Moments | None"
    b: Annotated[ANY | int, msgspec.Meta(description="one of")] | list[NAIVE] | None
    c: tuple[NAIVE_CLOCK, dict[str, datetime.time | bool]]
    d: str | None = None


class Tagged(msgspec.Struct, tag=True, array_like=True):
    text: str
    at: NAIVE


def patterns(schema: Any) -> list[str]:
    if not isinstance(schema, dict | list):
        return []
    parts = schema if isinstance(schema, list) else [schema[key] for key in schema if key != "pattern"]
    own = [schema["pattern"]] if isinstance(schema, dict) and "pattern" in schema else []
    return [*own, *(pattern for part in parts for pattern in patterns(part))]


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        (Moments, ["date-time", "partial-date-time", "date-time", "partial-time", "time"]),
        (Tagged, ["partial-date-time"]),
        (list[Tagged | ANY], ["date-time", "partial-date-time"]),
    ],
)
def test_moments_have_a_pattern_wherever_they_are(kind: Any, formats: list[str]) -> None:
    made = json.loads(grammar(json_schema=kind).text)
    assert sorted(patterns(made)) == sorted(FORMATS[name] for name in formats)


def test_a_moment_may_have_a_form_of_its_own() -> None:
    years = {"pattern": "^2[0-9]{3}-01-01T00:00:00Z$"}
    kind = Annotated[datetime.datetime, msgspec.Meta(extra_json_schema=years)]
    assert json.loads(grammar(json_schema=list[kind]).text)["items"] == {**years, "type": "string"}


def test_other_schemas_are_those_of_msgspec() -> None:
    for kind in (Point, Place, Named, list[Point | None], tuple[int, bytes], dict[str, set[int]], Literal["a"]):
        assert schema_with_moments(kind) == msgspec.json.schema(kind)


def test_objects_of_a_type_have_no_other_keys() -> None:
    assert json.loads(grammar(json_schema=Point).text)["$defs"]["Point"]["additionalProperties"] is False
    assert json.loads(grammar(json_schema=Person).text)["additionalProperties"] is False


def test_a_property_may_be_called_like_a_keyword() -> None:
    class Odd(msgspec.Struct):
        discriminator: str
        properties: dict[str, int]

    properties = json.loads(grammar(json_schema=Odd).text)["$defs"]["Odd"]["properties"]
    assert list(properties) == ["discriminator", "properties"]
    assert Grammar.of(json_schema={"properties": {"$ref": {"type": "string"}, "x-guidance": {}, "$id": {}}})
    assert Grammar.of(json_schema={"const": {"$ref": "https://example.com", "$id": "a"}})
