"""`Fields`: named values of a configuration file, read with their types checked."""

from collections.abc import Mapping
from typing import Any, TypeVar

from aphoton.errors import ModelError

__all__ = ["Fields"]

T = TypeVar("T")


class Fields:
    """A mapping read from ``source``. A value that is None counts as not there.

    Every getter takes a default for a field that is not there; without one the field is required.

    :raises ModelError: from every getter, naming the source, the field, what was found and what was expected.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer below 2**31."""
        value = self._get(name, "a positive integer", default)
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.error(name, "a positive integer below 2**31")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number, finite."""
        value = self._get(name, "a positive number", default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise self.error(name, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._get(name, "true or false", default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self._get(name, "a string", default)
        if type(value) is not str:
            raise self.error(name, "a string")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: none, one, or a list of them."""
        value = self.values.get(name)
        ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
        if not all(type(token) is int and token >= 0 for token in ids):
            raise self.error(name, "token ids")
        return ids

    def inner(self, name: str) -> "Fields":
        """The fields of an object; none when it is not there."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise self.error(name, "an object")
        return Fields(value or {}, f"{self.source}: {name}")

    def error(self, name: str, expected: str) -> ModelError:
        """What to raise when the value of ``name`` is not the ``expected``."""
        return ModelError(f"{self.source}: {name} is {self.values.get(name)!r}, expected {expected}")

    def _get(self, name: str, expected: str, default: object) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing, expected {expected}")
        return value
