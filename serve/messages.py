"""A conversation as clients send it, as chat templates take it."""

from collections.abc import Sequence
from typing import Any

from aphoton_serve.errors import ApiError

__all__ = ["read_messages", "text_length"]

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the fields that are null, and with the role ``developer`` under its older name, ``system``, which models
    know. What a content must be is the chat template's to say.

    :raises ApiError: 400, for a role that is none: it would stand in the prompt beside the model's own marks.
    """
    return [_read(f"messages[{i}]", message) for i, message in enumerate(messages)]


def text_length(value: Any) -> int:
    """Characters in all strings of a JSON value."""
    length, left = 0, [value]  # no recursion: a client says how deep it is
    while left:
        one = left.pop()
        if isinstance(one, str):
            length += len(one)
        elif isinstance(one, dict):
            left += one
            left += one.values()
        elif isinstance(one, list):
            left += one
    return length


def _read(field: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(
            400,
            f"{field}.role: must be one of {', '.join(ROLES)}, not {role!r:.100}",
            param=f"{field}.role",
            code="invalid_value",
        )
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    return {**kept, "role": "system"} if role == "developer" else kept
