"""The terminal: answers to stdout, everything else to stderr, and a bar while a model is fetched."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["BAD_INPUT", "FAILED", "FetchBar", "check_output", "err", "out", "say", "show"]

FAILED, BAD_INPUT = 1, 2
"""Exit codes."""

out = Console()
err = Console(stderr=True)


def say(message: str) -> None:
    """A line on stderr, as it is."""
    if sys.stderr is not None:  # None: closed, and print would take stdout
        print(message, file=sys.stderr, flush=True)


def check_output() -> None:
    """:raises OSError: when there is nowhere to `show` anything, as of a program that was started with ``>&-``."""
    if sys.stdout is None:
        raise OSError("standard output is closed")


def show(text: str) -> None:
    """Text of a model to stdout, as it is and at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


BYTES = ("Fetching", "Unpacking")
"""How what is told in bytes begins."""


class FetchBar:
    """A progress bar on stderr for as long as there is something to show, and then gone. Call it from any thread."""

    def __init__(self, console: Console = err) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what not in self._tasks:
            self._progress.start()
            self._tasks[what] = self._progress.add_task(what, total=total, amount="")
        show = decimal if what.startswith(BYTES) else str
        amount = show(done) if total is None else f"{show(done)} of {show(total)}"
        self._progress.update(self._tasks[what], completed=done, total=total, amount=amount)
