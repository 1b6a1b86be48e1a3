"""The names under which models are offered, and by which clients ask for them."""

from collections.abc import Collection, Iterable

from aphoton import InvalidRequest

__all__ = ["names_of", "with_adapter"]


def names_of(models: Iterable[str]) -> dict[str, str]:
    """What to load, by the name under which it is offered: that before ``=``, or the model's own.

    :raises InvalidRequest: for two of one name.
    """
    found: dict[str, str] = {}
    for given in models:
        before, equals, after = given.partition("=")
        name, model = (before, after) if equals else (given.rstrip("/").rpartition("/")[2], given)
        if not name or not model:
            raise InvalidRequest("model", f"must be NAME=MODEL or MODEL, not {given!r}")
        if name in found:
            raise InvalidRequest("model", f"two are named {name!r}: give NAME=MODEL")
        found[name] = model
    return found


def with_adapter(asked: str, models: Collection[str]) -> tuple[str, str] | None:
    """The model and its adapter that ``BASE:ADAPTER`` means; None when it means none of these models.

    A model whose own name has a colon is that model.
    """
    base, colon, adapter = asked.rpartition(":")
    return (base, adapter) if colon and base in models and asked not in models else None
