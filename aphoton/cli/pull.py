"""``aphoton pull``."""

from typing import Annotated

import typer

from aphoton.cli.terminal import FetchBar

__all__ = ["pull"]


def pull(
    model: Annotated[str, typer.Argument(help="smollm2, a hub id (org/name), or org/name/file.gguf on the hub.")],
) -> None:
    """Fetch a model, and print where it is. One that is here already is not fetched again."""
    from aphoton.models.hub import resolve  # brings torch

    with FetchBar() as bar:
        path = resolve(model, progress=bar)
    typer.echo(path)
