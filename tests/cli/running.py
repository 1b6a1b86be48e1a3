"""What the fixture ``run`` is."""

from collections.abc import Callable

from typer.testing import Result

__all__ = ["Run"]

Run = Callable[..., Result]
