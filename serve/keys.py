"""`KeyRing`: the API keys that open the service."""

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from aphoton.errors import InvalidRequest

__all__ = ["KeyRing", "read_keys"]

KEYS_VARIABLE = "APHOTON_API_KEYS"
SHORTEST = 8
"""Characters of a key."""

ENTRY = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?:sha256:(?P<digest>[0-9a-fA-F]{64})|(?P<key>[!-~]+))")


class KeyRing:
    """SHA-256 hashes of API keys, each under a name. The keys themselves are not kept.

    An empty ring opens for everybody.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """:param entries: each a key or ``sha256:`` and its hash in hexadecimal; ``name=`` may stand before either.
        Names go to the log; without one it is the key's number.
        :raises InvalidRequest: for an entry that is neither, by its number: its text may be a secret.
        """
        self._digests: dict[str, bytes] = {}
        for number, entry in enumerate(entries, 1):
            match = ENTRY.fullmatch(entry)
            if match is None:
                raise InvalidRequest("api_keys", f"entry {number} is neither a key nor sha256: and 64 hex digits")
            name = match["name"] or f"key-{number}"
            if name in self._digests:
                raise InvalidRequest("api_keys", f"entry {number} has the name of another: {name}")
            if match["digest"]:
                self._digests[name] = bytes.fromhex(match["digest"])
            elif len(match["key"]) < SHORTEST:
                raise InvalidRequest("api_keys", f"entry {number} is shorter than {SHORTEST} characters")
            else:
                self._digests[name] = _digest(match["key"])

    def __len__(self) -> int:
        return len(self._digests)

    def name_of(self, key: str) -> str | None:
        """Whose key this is; None when it is nobody's. Takes as long whichever it is."""
        given = _digest(key)
        found = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found


def read_keys(file: str | os.PathLike[str] | None = None) -> KeyRing:
    """The keys of a file, one a line (``#`` begins a comment), and those of the variable ``APHOTON_API_KEYS``, which
    spaces or commas separate.

    :raises InvalidRequest: for an entry that is no key, for a file that cannot be read, and for one without any: it was
        meant to close the door.
    """
    entries = re.split(r"[\s,]+", os.environ.get(KEYS_VARIABLE, "").strip())
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidRequest("api_keys_file", f"{file}: {error.strerror or error}") from error
        except UnicodeDecodeError:
            raise InvalidRequest("api_keys_file", f"{file}: is not UTF-8") from None
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        found = [line for line in lines if line]
        if not found:
            raise InvalidRequest("api_keys", "the file holds no key")
        entries += found
    return KeyRing(entry for entry in entries if entry)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
