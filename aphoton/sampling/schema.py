"""JSON schemas: made from types, and checked before they are compiled."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from aphoton.checks import shown
from aphoton.errors import InvalidRequest
from aphoton.sampling.moments import schema_with_moments

__all__ = ["Schema", "check_schema", "merge_tagged", "schema_text", "type_schema"]

MAX_TEXT = 256 * 1024
MAX_JSON_DEPTH = 1000
"""Python's limit of recursion, which its writer of JSON obeys."""
MAX_DEPTH = 400
"""Subschemas inside one another, references followed. The compiler recurses: 1,000 overflow a thread's stack of 8 MB,
which ends the process."""

_DAY = (
    "((000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_OFFSET = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_SPAN = "T([0-9]{1,4}H([0-9]{1,4}M)?([0-9]{1,4}S)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S)"

FORMATS = {
    "date": f"^{_DAY}$",
    "time": f"^{_CLOCK}{_OFFSET}$",
    "date-time": f"^{_DAY}T{_CLOCK}{_OFFSET}$",
    "partial-time": f"^{_CLOCK}$",
    "partial-date-time": f"^{_DAY}T{_CLOCK}$",
    "duration": f"^P([0-9]{{1,5}}D({_SPAN})?|{_SPAN})$",
    "decimal": r"^-?[0-9]{1,30}(\.[0-9]{1,30})?$",
}
"""What Python's types take, which is less than the formats allow (year 0, second 60, months), or not of JSON Schema."""

BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

SUBSCHEMA = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
SUBSCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
NAMED_SUBSCHEMAS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


class Schema(dict[str, Any]):
    """A copy of a request's schema that comes from its text, so that it is written and read once.

    :ivar text: the schema as JSON, which is what counts.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        super().__init__(json.loads(text))
        self.text = text

    def __reduce__(self) -> tuple[type["Schema"], tuple[str]]:
        return type(self), (self.text,)


def is_larger(value: Any, limit: int) -> bool:
    """Whether JSON of a value surely has more than ``limit`` characters; takes no longer for more.

    False where it is nested as deep as nothing is written: the writer comes there first, and says what is wrong.
    """
    size, waiting = 0, [iter((value,))]
    while waiting and size <= limit and len(waiting) < 4 * MAX_JSON_DEPTH:
        for part in waiting[-1]:
            size += 1
            if isinstance(part, str):
                size += len(part)
            elif isinstance(part, dict):
                waiting += iter(part), iter(part.values())
                break
            elif isinstance(part, list | tuple):
                waiting.append(iter(part))
                break
            if size > limit:
                break
        else:
            waiting.pop()
    return size > limit


def schema_text(schema: Mapping[str, Any]) -> str:
    """The schema as JSON, keys in their order: that is the order in which they are generated.

    :raises InvalidRequest: for what is not JSON.
    """
    if is_larger(schema, MAX_TEXT):
        raise InvalidRequest("json_schema", f"must be at most {MAX_TEXT} characters long")
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("json_schema", f"cannot be written as JSON: {error}") from None


def type_schema(kind: Any) -> dict[str, Any]:
    """The schema of a type. Objects with named fields have no other keys, unless the type says that they may.

    :raises InvalidRequest: for what has no schema.
    """
    try:
        pydantic = hasattr(kind, "model_json_schema")
        schema = kind.model_json_schema() if pydantic else schema_with_moments(kind)
    except Exception as error:  # pydantic's own errors derive from nothing that could be named here
        raise InvalidRequest("json_schema", f"cannot be made from {shown(kind)}: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidRequest("json_schema", f"of {shown(kind)} must be a dict, not {shown(schema)}")
    for part in subschemas(schema):
        part.pop("discriminator", None)  # OpenAPI's hint for parsers: the alternatives exclude each other without it
        part.pop("uniqueItems", None)  # a set: what comes twice is in it once
        if part.get("properties") and "additionalProperties" not in part:
            part["additionalProperties"] = False
        if part.get("type") == "string" and "pattern" not in part:
            if part.get("contentEncoding") == "base64":
                part["pattern"] = BASE64
            elif part.get("format") in FORMATS:
                part["pattern"] = FORMATS[part.pop("format")]
    return dict(schema)


def merge_tagged(schema: dict[str, Any]) -> bool:
    """Change ``oneOf`` into ``anyOf`` where a tag tells the alternatives apart: it is the same there, and supported.

    A tag is a property that all alternatives require and of which each allows other values.

    :returns: whether anything was changed.
    """
    changed = False
    for part in subschemas(schema):
        alternatives = part.get("oneOf")
        if isinstance(alternatives, list) and "anyOf" not in part and _tagged(schema, alternatives):
            part["anyOf"] = part.pop("oneOf")
            part.pop("discriminator", None)  # OpenAPI's name of the tag
            changed = True
    return changed


def _tagged(schema: dict[str, Any], alternatives: list[Any]) -> bool:
    objects = []
    for part in alternatives:
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            part = resolve(schema, part["$ref"])
        if not isinstance(part, dict) or part.get("type") != "object":
            return False
        properties, required = part.get("properties"), part.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return False
        objects.append({name: _values(properties[name]) for name in required if isinstance(properties.get(name), dict)})
    if not objects:
        return False
    for name in objects[0]:
        values = [value for tags in objects for value in tags.get(name, ())]
        if all(tags.get(name) for tags in objects) and len(values) == len(set(values)):
            return True
    return False


def _values(part: Mapping[str, Any]) -> list[str]:
    """The strings that a schema allows, if it allows only some."""
    values = [part["const"]] if "const" in part else part.get("enum")
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []


def lark_schemas(text: str) -> Iterator[dict[str, Any]]:
    """Those in a Lark grammar, and others in its texts and comments."""
    for match in re.finditer(r"%json\s*", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong, and where
        if isinstance(schema, dict):
            yield schema


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all those in it, but those that are only referred to. Values such as ``const`` are no schemas."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting.extend(children(part))


def children(part: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas directly inside one."""
    for key in SUBSCHEMA:
        if isinstance(part.get(key), dict):
            yield part[key]
    for key in SUBSCHEMAS:
        if isinstance(part.get(key), list):
            yield from part[key]
    for key in NAMED_SUBSCHEMAS:
        if isinstance(part.get(key), dict):
            yield from part[key].values()


def check_schema(schema: Mapping[str, Any], *, field: str = "json_schema") -> None:
    """What the compiler does not check, or not well.

    :raises InvalidRequest: naming ``field``.
    """
    if "x-guidance" in schema:
        raise InvalidRequest(field, "keyword x-guidance is not supported: how JSON is written is the engine's choice")
    for part in subschemas(schema):
        # Both would need a base address for each place. The compiler follows some of them wrongly, and the depth could
        # not be checked.
        if part is not schema and isinstance(part.get("$id"), str):
            raise InvalidRequest(field, "keyword $id is not supported in a subschema")
        ref = part.get("$ref")
        if isinstance(ref, str) and not ref.startswith("#"):
            raise InvalidRequest(field, f"keyword $ref is supported inside the schema only (#/...), not {ref!r:.200}")
    try:
        check_depth(schema, field)
    except RecursionError:
        raise InvalidRequest(field, f"must be nested at most {MAX_DEPTH} deep, references included") from None


def check_depth(schema: Mapping[str, Any], field: str) -> None:
    """:raises InvalidRequest: when subschemas are too deep in one another, references followed.

    Exact where references make no circle and all are pointers into the schema; else it is the sum of all.
    """
    depths: dict[int, int] = {}  # by the part's id: each is gone through once, whatever leads to it
    opened: set[int] = set()
    refs: set[str] = set()
    unknown: set[str] = set()
    circles = False

    def depth(part: Any) -> int:
        nonlocal circles
        if not isinstance(part, list | Mapping):
            return 0
        known = depths.get(id(part))
        if known is not None:
            return known
        if id(part) in opened:
            circles = True
            return 0
        opened.add(id(part))
        deepest = max(map(depth, part if isinstance(part, list) else part.values()), default=0)
        ref = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(ref, str):
            refs.add(ref)
            target = resolve(schema, ref)
            if target is None:
                unknown.add(ref)
            deepest = max(deepest, depth(target))
        opened.discard(id(part))
        depths[id(part)] = 1 + deepest
        return 1 + deepest

    total = depth(schema)
    if circles:
        alone: dict[int, int] = {}
        total = depth_without_refs(schema, alone)
        total += sum(depth_without_refs(resolve(schema, ref), alone) for ref in refs)
    if unknown:
        total += len(unknown) * depth_without_refs(schema, {})  # wherever an anchor is, what it names is no deeper
    if total > MAX_DEPTH:
        raise InvalidRequest(field, f"must be nested at most {MAX_DEPTH} deep, references included, not {total}")


def depth_without_refs(part: Any, known: dict[int, int]) -> int:
    """:param known: by the part's id; filled in."""
    if not isinstance(part, list | Mapping):
        return 0
    if id(part) not in known:
        parts = part if isinstance(part, list) else part.values()
        known[id(part)] = 1 + max((depth_without_refs(each, known) for each in parts), default=0)
    return known[id(part)]


def resolve(schema: Mapping[str, Any], ref: str) -> Any:
    """What a pointer into the schema points to; None for any other reference."""
    if not ref.startswith("#"):
        return None
    part: Any = schema
    pointer = unquote(ref[1:])
    if pointer and not pointer.startswith("/"):
        return None
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and len(name) < 10 and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, Mapping):
            part = part.get(name)
        else:
            return None
    return part
