"""The format of each datetime and time in a type's schema.

msgspec writes none where an offset may be missing. Any text could then be generated, and the type would refuse it.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

__all__ = ["schema_with_moments"]

Array = inspect.CollectionType | inspect.TupleType
Class = inspect.StructType | inspect.DataclassType | inspect.TypedDictType | inspect.NamedTupleType
Moment = inspect.DateTimeType | inspect.TimeType


def schema_with_moments(kind: Any) -> dict[str, Any]:
    """What ``msgspec.json.schema`` returns, but with a format for each moment: ``partial-...`` is without an offset."""
    info = inspect.type_info(kind)
    classes = _classes(info)
    # Made together: only so does msgspec say by which name it refers to each class.
    (schema, *refs), definitions = msgspec.json.schema_components((kind, *classes))
    waiting: list[tuple[inspect.Type, Any]] = [(info, schema)]
    for each, ref in zip(classes.values(), refs, strict=True):
        waiting.append((each, definitions.get(ref.get("$ref", "").removeprefix("#/$defs/"))))
    while waiting:
        info, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        if not isinstance(info, Moment):
            waiting.extend(_inner(info, part))
        elif part.get("type") == "string" and part.keys().isdisjoint(("$ref", "const", "enum", "format", "pattern")):
            name = "date-time" if isinstance(info, inspect.DateTimeType) else "time"
            part["format"] = f"partial-{name}" if info.tz is False else name
    if definitions:
        schema["$defs"] = definitions
    return schema


def _classes(info: inspect.Type) -> dict[Any, Class]:
    """Those that a type is made of, itself included. They may be made of each other."""
    found: dict[Any, Class] = {}
    waiting = [info]
    while waiting:
        info = waiting.pop()
        if isinstance(info, Class):
            if info.cls in found:
                continue
            found[info.cls] = info
        waiting.extend(inner for inner, _ in _inner(info, {}))
    return found


def _inner(info: inspect.Type, part: dict[str, Any]) -> Iterator[tuple[inspect.Type, Any]]:
    """The types directly inside one, each with its part of the schema; None where there is no such part.

    Nothing of a class has a part where the class is only referred to.
    """
    if isinstance(info, inspect.Metadata):
        yield info.type, part
    elif isinstance(info, inspect.CollectionType):
        yield info.item_type, part.get("items")
    elif isinstance(info, inspect.TupleType):
        yield from _in_order(info.item_types, part.get("prefixItems"))
    elif isinstance(info, inspect.DictType):
        yield info.value_type, part.get("additionalProperties")
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            yield each, _alternative(each, part)
    elif isinstance(info, Class):
        properties, items = part.get("properties"), part.get("prefixItems")
        if isinstance(properties, dict):
            yield from ((field.type, properties.get(field.encode_name)) for field in info.fields)
        else:
            if isinstance(items, list) and isinstance(info, inspect.StructType) and info.tag_field is not None:
                items = items[1:]
            yield from _in_order(tuple(field.type for field in info.fields), items)


def _in_order(infos: tuple[inspect.Type, ...], parts: Any) -> Iterator[tuple[inspect.Type, Any]]:
    if not isinstance(parts, list) or len(parts) != len(infos):
        parts = [None] * len(infos)
    return zip(infos, parts, strict=True)


def _alternative(info: inspect.Type, part: dict[str, Any]) -> dict[str, Any] | None:
    """A union's part for one of its types. A union has at most one string, one array and one dict in JSON.

    Classes are referred to, and so is none of these.
    """
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):
        return part  # has the alternatives of the inner one, too
    kind = "string" if isinstance(info, Moment) else "array" if isinstance(info, Array) else "object"
    found = [each for each in _alternatives(part) if each.get("type") == kind]
    return found[0] if len(found) == 1 else None


def _alternatives(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of the unions inside, too."""
    parts = part.get("anyOf")
    for each in parts if isinstance(parts, list) else ():
        if isinstance(each, dict):
            yield each
            yield from _alternatives(each)
