"""`app`: the commands put together, and how an error ends one."""

import sys
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from aphoton import __version__
from aphoton.cli.bench import bench
from aphoton.cli.chat import chat
from aphoton.cli.doctor import doctor
from aphoton.cli.generate import generate
from aphoton.cli.missing import MissingExtra
from aphoton.cli.prebuild import prebuild
from aphoton.cli.pull import pull
from aphoton.cli.terminal import BAD_INPUT, FAILED, say
from aphoton.cli.trace import trace
from aphoton.errors import AphotonError, InvalidRequest

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """Commands that end in one line on stderr when something is wrong, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InvalidRequest as error:
            say(f"error: {error}")
            raise typer.Exit(BAD_INPUT) from None
        except (AphotonError, MissingExtra) as error:
            say(f"error: {error}")
            raise typer.Exit(FAILED) from None
        except BrokenPipeError:
            raise  # of whoever read the output: typer ends without a word
        except OSError as error:  # of a file that was named on the command line
            place = "" if error.filename is None else f"{error.filename}: "
            say(f"error: {place}{error.strerror or error}")
            raise typer.Exit(FAILED) from None


app = typer.Typer(
    name="aphoton",
    cls=Commands,
    help="A language model inside your program: fetch one, run it, talk to it, measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (pull, generate, chat, bench, trace, doctor, prebuild):
    app.command()(command)
# Packages that know this one, which does not know them, have commands of their own.
for entry in sorted(entry_points(group="aphoton.commands"), key=lambda entry: entry.name):
    app.command(entry.name)(entry.load())


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"aphoton {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    pass


def main() -> None:
    """The entry point ``aphoton``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may write what the terminal cannot show
    app()
