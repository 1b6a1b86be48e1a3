"""`options`: the fields of a settings class as options of a command, so that the two never differ."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

__all__ = ["options"]

Command = Callable[..., None]


def options(
    kind: type[msgspec.Struct],
    into: str,
    *,
    panel: str,
    leave_out: tuple[str, ...] = (),
    names: Mapping[str, str] | None = None,
    prefix: str = "",
    unit: str = "",
) -> Callable[[Command], Command]:
    """Give a command an option for each field of ``kind``.

    The help is what the class's docstring says behind ``:ivar``. What is not given on the command line is not in the
    dictionary, so the class's own defaults hold.

    :param kind: whose fields they are.
    :param into: the command's parameter that gets the values given, as a dictionary by field.
    :param panel: the heading over these options.
    :param names: options that are not called like their field.
    :param prefix: before every option's name.
    :param unit: of all values: they are given in thousandths of the class's own (``ms`` for seconds).
    """
    scale = 1e3 if unit else 1.0
    documented = _documented(kind)

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        parameters = [p for p in signature.parameters.values() if p.name != into]
        by_option: dict[str, str] = {}
        for field, annotation, default in _fields(kind):
            if field in leave_out:
                continue
            option = prefix + (names or {}).get(field, field)
            by_option[option] = field
            shown = default * scale if unit else default
            parameters.append(
                inspect.Parameter(
                    option,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[
                        _option_type(annotation) | None,
                        typer.Option(
                            help=documented.get(field, "") + (f" In {unit}." if unit else ""),
                            show_default=False if default in (None, ()) else _shown(shown),
                            rich_help_panel=panel,
                        ),
                    ],
                )
            )

        @functools.wraps(command)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            given = {field: kwargs.pop(option) for option, field in by_option.items()}
            given = {field: value for field, value in given.items() if value is not None and value != []}
            if unit:
                given = {field: value / scale for field, value in given.items()}
            command(*args, **kwargs, **{into: given})

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _fields(kind: type[msgspec.Struct]) -> Iterator[tuple[str, Any, Any]]:
    """(name, type, default) of each field; one without a default has None."""
    hints = get_type_hints(kind)
    for info in msgspec.structs.fields(kind):
        yield info.name, hints[info.name], None if info.default is msgspec.NODEFAULT else info.default


def _option_type(annotation: Any) -> Any:
    """What the command line parses: the field's own checks come later."""
    kinds = [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    for kind in kinds:
        if get_origin(kind) in (tuple, list, Sequence):
            return list[get_args(kind)[0]]  # type: ignore[misc]
        if get_origin(kind) is Literal:
            values = get_args(kind)
            return kind if all(isinstance(value, str) for value in values) else type(values[0])
    return kinds[0]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _documented(kind: type) -> dict[str, str]:
    """What the docstring's ``:ivar`` entries say, without markup."""
    text = inspect.getdoc(kind) or ""
    found = {}
    for names, description in re.findall(r"^:ivar ([\w, ]+):(.*(?:\n[ \t]+.*)*)", text, re.MULTILINE):
        plain = " ".join(description.replace("`", "").replace("None:", "Not given:").split())
        for name in names.split(","):
            found[name.strip()] = plain[:1].upper() + plain[1:]
    return found
