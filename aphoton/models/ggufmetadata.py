"""`GGUFMetadata`: the named values of a GGUF file."""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from gguf import ReaderField

__all__ = ["GGUFMetadata", "Strings"]


class GGUFMetadata(Mapping[str, Any]):
    """Every key with its value (str, int, float, bool, or a list of one of them), which is made when it is asked for.

    A vocabulary is 100,000 strings and more. Kept while a model is loaded, they would leave Python's memory full of
    holes: with what lives as long as the engine between them, it would not go back to the system.

    :raises ValueError: for a value that cannot be read.
    """

    def __init__(self, fields: Mapping[str, ReaderField]) -> None:
        self._fields = fields
        for field in fields.values():
            _contents(field)  # each of them can be read

    def __getitem__(self, name: str) -> Any:
        return _contents(self._fields[name])

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class Strings:
    """An array of strings as it stands in a file: each one's length in 8 bytes, and its UTF-8.

    :ivar size: bytes.
    """

    def __init__(self, data: memoryview, count: int) -> None:
        """:raises struct.error, ValueError: for an array that ends behind ``data``."""
        self.size = 0
        for _ in range(count):
            self.size += 8 + struct.unpack_from("<Q", data, self.size)[0]
        if self.size > len(data):
            raise ValueError(f"an array of strings has {self.size} bytes of {len(data)}")
        self._data = data[: self.size]

    def __iter__(self) -> Iterator[str]:
        position = 0
        while position < self.size:
            (length,) = struct.unpack_from("<Q", self._data, position)
            position += 8 + length
            yield str(self._data[position - length : position], "utf-8")


def _contents(field: ReaderField) -> Any:
    """A field's value. The package does not know `Strings` as parts."""
    arrays = [part for part in (field.parts[index] for index in field.data) if isinstance(part, Strings)]
    return [string for strings in arrays for string in strings] if arrays else field.contents()
