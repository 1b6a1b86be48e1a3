"""``aphoton serve``.

Imports what the ``serve`` extra brings when it runs, so that the other commands need none of it.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aphoton import EngineConfig, InvalidRequest
from aphoton.checks import check_float
from aphoton.cli.generate import MODEL_HELP
from aphoton.cli.missing import load_extra
from aphoton.cli.options import options
from aphoton.cli.terminal import FetchBar, say
from aphoton.heap import frozen_heap
from aphoton_serve.naming import names_of
from aphoton_serve.settings import ServiceSettings

if TYPE_CHECKING:
    from aphoton_serve.keys import KeyRing

__all__ = ["serve"]

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@options(ServiceSettings, "service", panel="Service")
@options(EngineConfig, "settings", panel="Engine", leave_out=("overload",), names={"pipeline_depth": "depth"})
def serve(
    model: Annotated[list[str], typer.Argument(help=f"One or more, each as NAME=MODEL or MODEL: {MODEL_HELP}")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="API keys, one a line: KEY or sha256:HASH, after NAME= if you like. Also: $APHOTON_API_KEYS."
        ),
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running requests get at the end.")] = 30.0,
    ray: Annotated[bool, typer.Option("--ray", help="Through Ray Serve: each model in a process of its own.")] = False,
    *,
    settings: dict[str, Any],
    service: dict[str, Any],
) -> None:
    """Serve models over HTTP, as OpenAI's API does."""
    load_extra("uvicorn", "serve")
    load_extra("starlette", "serve")
    load_extra("prometheus_client", "serve")
    from aphoton_serve.keys import read_keys

    check_float("grace", grace, 0.0, 1e6)
    models = names_of(model)
    keys = read_keys(api_keys_file)
    local = _is_loopback(host)
    if local and "allowed_hosts" not in service:
        own = f"[{host}]" if ":" in host and not host.startswith("[") else host
        service = {**service, "allowed_hosts": tuple(dict.fromkeys((*LOOPBACK_NAMES, own)))}
    if not local and not len(keys):
        say(f"warning: anybody who reaches {host}:{port} may use this server: give it API keys")
    made = ServiceSettings(**service)
    EngineConfig(**settings)  # what cannot be is refused before anything is loaded
    _check_free(host, port)
    if ray:
        if settings.get("device") != "sim":
            _check_models(models.values())
        load_extra("ray", "serve")
        from aphoton_serve.app import run

        run(models, settings, made, keys, host=host, port=port, grace=grace)
    else:
        asyncio.run(_serve(models, settings, made, keys, host=host, port=port, grace=grace))


async def _serve(
    models: dict[str, str],
    settings: dict[str, Any],
    service: ServiceSettings,
    keys: "KeyRing",
    *,
    host: str,
    port: int,
    grace: float,
) -> None:
    import logging

    from aphoton_serve.local import LocalBackend
    from aphoton_serve.server import Server
    from aphoton_serve.service import make_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with FetchBar() as bar:
        backend = await LocalBackend(models, tick_timeout=service.tick_timeout, progress=bar, **settings).start()
    try:
        app = make_app(backend, service, keys=keys)
        with frozen_heap():
            await Server(app, backend, host=host, port=port, body_timeout=service.body_timeout, grace=grace).serve()
    finally:
        await backend.aclose()


def _check_free(host: str, port: int) -> None:
    """Before the models are loaded, which may take minutes.

    :raises InvalidRequest: when nobody could listen there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidRequest("port", f"{port} is in use on {host}") from None
        raise InvalidRequest("host", f"{host} cannot be listened on: {error.strerror or error}") from None


def _check_models(models: Iterable[str]) -> None:
    """Fetch them: what cannot be is told here in a line, and by a replica in hundreds, again and again.

    :raises ModelError: for one that is not there.
    """
    from aphoton.models import find_checkpoint  # brings torch

    with FetchBar() as bar:
        for model in models:
            find_checkpoint(model, bar)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
