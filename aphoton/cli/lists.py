"""Options that hold a list: ``1,8,32``."""

from aphoton import InvalidRequest
from aphoton.checks import check_choice, check_int

__all__ = ["choices", "integers"]


def integers(field: str, text: str, *, low: int = 1, high: int, repeats: bool = False) -> list[int]:
    """The different numbers of a list, or all of them.

    :raises InvalidRequest: unless they are integers from ``low`` to ``high``.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(field, f"must be integers with commas between, not {text!r}") from None
    for value in values:
        check_int(field, value, low, high)
    return values if repeats else list(dict.fromkeys(values))


def choices(field: str, text: str, known: tuple[str, ...]) -> list[str]:
    """The different words of a list.

    :raises InvalidRequest: unless all are among ``known``.
    """
    values = text.split(",")
    for value in values:
        check_choice(field, value, known)
    return list(dict.fromkeys(values))
