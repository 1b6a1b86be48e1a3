"""`Grammar`: what a request's text must be."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from aphoton.checks import shown
from aphoton.errors import InvalidRequest
from aphoton.sampling.schema import (
    MAX_TEXT,
    Schema,
    check_schema,
    lark_schemas,
    merge_tagged,
    schema_text,
    type_schema,
)

__all__ = ["Grammar", "GrammarKind"]

GrammarKind = Literal["json_schema", "json_object", "regex", "choices", "grammar"]

MAX_LARK_TEXT = 32 * 1024
MAX_LARK_RULES = 1000


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable description of the texts that are allowed. `GrammarCompiler` makes it ready for a vocabulary.

    JSON has no white space but an optional space behind ``:`` and ``,``, and an object's keys come in the schema's
    order: a model that likes blanks cannot write them for ever.

    :ivar kind: the request's field that it came from.
    :ivar text: a JSON schema, a regular expression, a JSON list of choices, or a Lark grammar.
    :ivar type: what JSON is made into by `parse`: None for plain dicts, lists, strings and numbers.
    """

    kind: GrammarKind
    text: str
    type: Any = None

    @staticmethod
    def of(
        *,
        json_schema: Any = None,
        json_object: bool = False,
        regex: str | None = None,
        choices: tuple[str, ...] | list[str] | None = None,
        grammar: str | None = None,
    ) -> "Grammar | None":
        """The grammar of a request's fields, of which at most one may be given; None for none.

        Takes time for a large schema: about 1 ms for 10 KB. What only the compiler can tell (a keyword that is not
        supported, an error in a pattern) is not found here.

        :param json_schema: a JSON schema as a dict; or a type: a msgspec struct, a dataclass, a TypedDict, a pydantic
            model, or what else `msgspec.json.schema` takes. Objects of a type have no other keys but where it says so.
            Formats that are known (date, time, date-time, duration, email, hostname, ipv4, ipv6, uri, uuid) are kept;
            others are refused. A date or time whose schema has no format (msgspec's, without ``Meta(tz=True)``) is any
            string. References lead into the schema itself: ``#/...``.
        :param json_object: any JSON object.
        :param regex: in the syntax of Rust's ``regex`` crate, which has no look-around and no back-references. The
            whole text matches it; ``^`` and ``$`` are not needed.
        :param choices: the text is one of these.
        :param grammar: in llguidance's variant of Lark, with a rule ``start``. What a rule's ``stop`` or ``suffix``
            matches is part of the text.
        :raises InvalidRequest: for more than one, and for one that is no grammar.
        """
        if type(json_object) is not bool:
            raise InvalidRequest("json_object", f"must be true or false, not {shown(json_object)}")
        given = [
            name
            for name, value in (
                ("json_schema", json_schema),
                ("json_object", json_object or None),
                ("regex", regex),
                ("choices", choices),
                ("grammar", grammar),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise InvalidRequest(
                given[1], f"cannot be combined with {given[0]}: at most one says what the text must be"
            )
        if json_schema is not None:
            return _from_schema(json_schema)
        if json_object:
            return Grammar(kind="json_object", text='{"type":"object"}')
        if regex is not None:
            return Grammar(kind="regex", text=_check_text("regex", regex, MAX_TEXT))
        if choices is not None:
            return _from_choices(choices)
        if grammar is not None:
            return _from_lark(grammar)
        return None

    @property
    def is_json(self) -> bool:
        return self.kind in ("json_schema", "json_object")

    def parse(self, text: str, *, complete: bool = True) -> Any:
        """The object that a text stands for; the text itself where the grammar is not one of JSON.

        :param complete: whether the grammar was satisfied where the text ends (`GrammarMasker.complete`).
        :returns: None for a text that was cut: not complete, or, because of a stop string, no JSON.
        :raises ValueError: when the type refuses what its schema allows: a 30th of February, a validator of its own.
        """
        if not complete:
            return None
        if not self.is_json:
            return text
        try:
            plain = json.loads(text)  # not msgspec's, which refuses 1e999
        except ValueError:
            return None
        except RecursionError as error:
            raise ValueError(f"the text is nested too deeply to be read: {error}") from error
        if self.type is None:
            return plain
        try:
            if hasattr(self.type, "model_validate_json"):
                return self.type.model_validate_json(text)
            return msgspec.convert(plain, self.type, builtin_types=())
        except Exception as error:  # what a validator of its own raises, too
            raise ValueError(f"{_name(self.type)} cannot be made of the text: {error}") from error


def _from_schema(given: Any) -> Grammar:
    """From a dict or a type."""
    kind = None
    if isinstance(given, Mapping):
        text = given.text if isinstance(given, Schema) else schema_text(given)
    elif isinstance(given, str | bytes | bool | int | float | list | tuple):
        raise InvalidRequest("json_schema", f"must be a dict or a type, not {shown(given)}")
    else:
        kind, text = given, schema_text(type_schema(given))
    _check_text("json_schema", text, MAX_TEXT)
    schema = json.loads(text)  # as the compiler will read it: no tuples, no circles
    check_schema(schema)
    if merge_tagged(schema):
        text = schema_text(schema)
    return Grammar(kind="json_schema", text=text, type=kind)


def _from_choices(choices: Any) -> Grammar:
    if not isinstance(choices, tuple | list):
        raise InvalidRequest("choices", f"must be a list of strings, not {shown(choices)}")
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest("choices", "must be at least one string, none of them empty")
    if len(set(choices)) < len(choices):
        twice = next(choice for i, choice in enumerate(choices) if choice in choices[:i])
        raise InvalidRequest("choices", f"must differ from each other; {shown(twice)} is there twice")
    for choice in choices:
        _check_text("choices", choice, MAX_TEXT)
    text = json.dumps(choices, ensure_ascii=False)
    return Grammar(kind="choices", text=_check_text("choices", text, MAX_TEXT))


def _from_lark(text: Any) -> Grammar:
    _check_text("grammar", text, MAX_LARK_TEXT)
    # The compiler follows rules and brackets by recursion: a chain of some thousands would overflow the thread's stack,
    # which ends the process. What is counted is at least the depth.
    nested = sum(text.count(mark) for mark in ":([{")
    if nested > MAX_LARK_RULES:
        raise InvalidRequest("grammar", f"must have at most {MAX_LARK_RULES} rules and brackets, not {nested}")
    for attributes in re.findall(r"^[ \t]*[?!]?\w+[ \t]*\[([^\]]*)\]", text, re.MULTILINE):
        if idle := re.search(r"\b(temperature|capture)\b|\bstop[ \t]*=[ \t]*\"\"", attributes):
            raise InvalidRequest("grammar", f"the attribute {idle[0]} is not supported")
    for schema in lark_schemas(text):
        check_schema(schema, field="grammar")
    return Grammar(kind="grammar", text=text)


def _check_text(field: str, text: Any, limit: int) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(field, f"must be a string that is not empty, not {shown(text)}")
    if len(text) > limit:
        raise InvalidRequest(field, f"must be at most {limit} characters long, not {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not Unicode text: a lone surrogate at character {error.start}") from None
    return text


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
