"""Checks of values that a caller gives: each failure is an `InvalidRequest` that names the field and the limit."""

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from aphoton.errors import InvalidRequest

__all__ = ["build", "check_choice", "check_float", "check_int", "check_ints", "shown"]

S = TypeVar("S", bound=msgspec.Struct)

LONGEST = 80
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = LONGEST


def shown(value: object) -> str:
    """A value as a message shows it: `repr`, shortened, of whatever there may be."""
    if type(value) is int and value.bit_length() > 200:  # beyond 4,300 digits Python refuses to write it
        return f"a number of {value.bit_length()} bits"
    try:
        return _repr.repr(value)[:LONGEST]
    except Exception:
        return f"something of the type {type(value).__name__}"


def check_int(field: str, value: object, low: int, high: int | None = None) -> None:
    """:raises InvalidRequest: unless ``value`` is an integer (not a bool) in ``low..high``."""
    if type(value) is not int:
        raise InvalidRequest(field, f"must be an integer, not {shown(value)}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(field, f"must be {limit}, not {shown(value)}")


def check_ints(field: str, values: object, low: int, high: int | None = None) -> tuple[int, ...]:
    """The integers of a list.

    :raises InvalidRequest: unless ``values`` is a tuple or a list, and all in it are integers in ``low..high``.
    """
    if not isinstance(values, tuple | list):
        raise InvalidRequest(field, f"must be a tuple of integers, not {shown(values)}")
    for value in values:
        check_int(field, value, low, high)
    return tuple(values)


def check_float(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """:raises InvalidRequest: unless ``value`` is a finite number in ``low..high`` (not ``low``, if ``open_low``)."""
    if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
        raise InvalidRequest(field, f"must be a finite number, not {shown(value)}")
    if value < low or value > high or (open_low and value == low):  # type: ignore[operator]
        bracket = "(" if open_low else "["
        raise InvalidRequest(field, f"must be in {bracket}{low:g}, {high:g}], not {shown(value)}")


def check_choice(field: str, value: object, choices: Iterable[object]) -> None:
    """:raises InvalidRequest: unless ``value`` is one of ``choices``."""
    known = tuple(choices)
    if not any(type(value) is type(one) and value == one for one in known):
        raise InvalidRequest(field, f"must be one of {', '.join(map(repr, known))}, not {shown(value)}")


def build(kind: type[S], fields: Mapping[str, Any]) -> S:
    """A ``kind`` from keyword arguments.

    :raises InvalidRequest: for a name that ``kind`` does not have, naming it, and whatever its own checks raise.
    """
    for name in fields:
        if name not in kind.__struct_fields__:
            known = ", ".join(kind.__struct_fields__)
            raise InvalidRequest(name, f"unknown parameter; {kind.__name__} has {known}")
    return kind(**fields)
