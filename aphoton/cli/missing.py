"""`MissingExtra`: a library that a command needs and the core install does not bring."""

import importlib
from typing import Any

__all__ = ["MissingExtra", "load_extra"]


class MissingExtra(Exception):
    """Says what to install."""


def load_extra(module: str, extra: str) -> Any:
    """The module of that name, which comes with an extra of this package.

    :raises MissingExtra: when it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtra(f"this needs {package}: pip install 'aphoton[{extra}]'") from None
