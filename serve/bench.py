"""``aphoton serve-bench``: what the service costs: an engine alone, over HTTP, and through Ray Serve.

Imports what the ``serve`` extra brings when it runs, so that the other commands need none of it.
"""

import asyncio
import multiprocessing
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from aphoton import AphotonError, EngineConfig, InvalidRequest
from aphoton.checks import check_int
from aphoton.cli.generate import MODEL_HELP
from aphoton.cli.lists import choices, integers
from aphoton.cli.missing import load_extra
from aphoton.cli.options import options
from aphoton.cli.place import check_place
from aphoton.cli.plot import load_matplotlib
from aphoton.cli.terminal import out, say
from aphoton.heap import frozen_heap
from aphoton_serve.benchclient import DONE, NAME, PROMPT, Ask, Reply, completions, post
from aphoton_serve.cluster import local_cluster
from aphoton_serve.ramp import Course, Ramp, ramp_on_ray
from aphoton_serve.rampplot import draw

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from aphoton import Engine

__all__ = ["Figures", "serve_bench"]

ENGINE, HTTP, RAY, EMPTY = "engine", "http", "ray", "empty"
CONCURRENCY, ROUNDS = "1,8,32", 3
WAYS = (ENGINE, HTTP, RAY, EMPTY)
THREADS = 1
"""Of every engine that is compared: Ray gives as many to a replica of one CPU, and this small a model is faster so."""
STAGE, REPLICAS = 30.0, 3
EVENT = b"data: {" + b" " * 200 + b"}\n\n"
"""About as long as a chunk of an answer."""


class Round(msgspec.Struct, frozen=True):
    """All streams of one round."""

    seconds: float
    replies: list[Reply]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What some streams at once came to: medians over the rounds.

    :ivar way: what was measured.
    :ivar tok_s: tokens a second, of all streams together.
    :ivar ttft: milliseconds until a stream's first token, median of the streams.
    :ivar events: that a stream had.
    """

    way: str
    streams: int
    tok_s: float
    ttft: float
    events: float


@options(EngineConfig, "settings", panel="Engine", leave_out=("overload",), names={"pipeline_depth": "depth"})
def serve_bench(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "random:tiny",
    concurrency: Annotated[str, typer.Option(help="Streams at once, e.g. 1,8,32.")] = CONCURRENCY,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each stream.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="Whose medians are shown. One more before does not count.")
    ] = ROUNDS,
    ways: Annotated[
        str,
        typer.Option(
            help="What to measure: the engine alone, over HTTP in one process, through Ray Serve, and Ray Serve with "
            "nothing to do."
        ),
    ] = ",".join(WAYS),
    ramp: Annotated[
        str | None,
        typer.Option(
            help="Instead: clients of each stage, e.g. 1,8,24,8,1, of a model that has as many replicas as they need."
        ),
    ] = None,
    stage: Annotated[float | None, typer.Option(help="Of a ramp's stages, in seconds. Not given: 30.")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="Of the model in a ramp. Not given: 3.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="A picture (PNG) of a ramp's load, replicas and times to the first token.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON, not as a table.")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Measure what the HTTP service and Ray Serve cost, best on a small model: tokens a second, and time to the first.

    All runs on this machine, the clients too; engines compute with one thread, as in a replica of one CPU.
    """
    load_extra("uvicorn", "serve")
    load_extra("starlette", "serve")
    load_extra("prometheus_client", "serve")
    EngineConfig(**settings)  # what cannot be is refused before anything is loaded
    if ramp is not None:
        if (concurrency, rounds, ways) != (CONCURRENCY, ROUNDS, ",".join(WAYS)):
            raise InvalidRequest("ramp", "has no concurrency, rounds or ways")
        clients = integers("ramp", ramp, high=10_000, repeats=True)
        steps = Ramp(clients, STAGE if stage is None else stage, output_tokens)
        course = _ramp(model, settings, steps, REPLICAS if max_replicas is None else max_replicas, plot)
        out.print_json(msgspec.json.encode(course).decode()) if as_json else _show_course(course)
        return
    for name, value in (("stage", stage), ("max_replicas", max_replicas), ("plot", plot)):
        if value is not None:
            raise InvalidRequest(name, "needs a ramp")
    counts = integers("concurrency", concurrency, high=10_000)
    check_int("rounds", rounds, 1, 1000)
    asked = choices("ways", ways, WAYS)
    figures = _ways(asked, model, {"max_rows": max(counts), **settings}, Plan(counts, output_tokens, rounds))
    out.print_json(msgspec.json.encode(figures).decode()) if as_json else _show(figures)


def _ways(asked: list[str], model: str, settings: dict[str, Any], plan: "Plan") -> list[Figures]:
    figures: list[Figures] = []
    if ENGINE in asked:
        say("measuring the engine alone")
        figures += asyncio.run(_engine_alone(model, settings, plan))
    if HTTP in asked:
        say("measuring HTTP in one process")
        figures += asyncio.run(_over_http(model, settings, plan))
    if RAY in asked or EMPTY in asked:
        load_extra("ray", "serve")
        with redirect_stdout(sys.stderr), local_cluster() as url:  # Ray's own words are no figures
            if RAY in asked:
                say("measuring Ray Serve")
                figures += _through_ray(url, model, settings, plan)
            if EMPTY in asked:
                say("measuring Ray Serve with nothing to do")
                figures += _empty(url, plan)
    return figures


def _ramp(model: str, settings: dict[str, Any], ramp: Ramp, max_replicas: int, plot: Path | None) -> Course:
    check_int("max_replicas", max_replicas, 2, 1000)
    check_place("plot", plot)
    if plot is not None:
        load_matplotlib()
    load_extra("ray", "serve")
    with redirect_stdout(sys.stderr):  # for what Ray says itself
        course = ramp_on_ray(model, settings, ramp, max_replicas)
    if plot is not None:
        draw(course, plot)
        say(str(plot))
    return course


class Plan:
    """How much is measured of each way."""

    def __init__(self, counts: list[int], tokens: int, rounds: int) -> None:
        self._counts = counts
        self._tokens = tokens
        self._rounds = rounds

    async def measure(self, way: str, ask: Ask) -> list[Figures]:
        """Of each number of streams, all begun at the same time."""
        return [await self._of(way, ask, streams) for streams in self._counts]

    async def _of(self, way: str, ask: Ask, streams: int) -> Figures:
        rounds = [await self._round(ask, streams) for _ in range(1 + self._rounds)][1:]
        return Figures(
            way=way,
            streams=streams,
            tok_s=median(streams * self._tokens / one.seconds for one in rounds),
            ttft=1e3 * median(median(reply.first for reply in one.replies) for one in rounds),
            events=median(median(reply.events for reply in one.replies) for one in rounds),
        )

    async def _round(self, ask: Ask, streams: int) -> Round:
        began = time.perf_counter()
        replies = await asyncio.gather(*(ask(self._tokens) for _ in range(streams)))
        return Round(time.perf_counter() - began, list(replies))


async def _engine_alone(model: str, settings: dict[str, Any], plan: Plan) -> list[Figures]:
    import torch

    from aphoton import Engine

    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        return await _of_engine(Engine(model, **settings), plan)
    finally:
        torch.set_num_threads(threads)


async def _of_engine(made: "Engine", plan: Plan) -> list[Figures]:
    async with made as engine:

        async def ask(tokens: int) -> Reply:
            began, first, pieces = time.perf_counter(), None, 0
            async for _ in engine.stream(PROMPT, max_tokens=tokens, ignore_eos=True):
                first = first or time.perf_counter()
                pieces += 1
            assert first is not None
            return Reply(first - began, time.perf_counter() - began, pieces)

        with frozen_heap():  # as the server's
            return await plan.measure("engine alone", ask)


async def _over_http(model: str, settings: dict[str, Any], plan: Plan) -> list[Figures]:
    """The server in a process of its own, with its engine."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve_http, args=(theirs, model, settings), daemon=True)
    server.start()
    theirs.close()
    try:
        try:
            port = await asyncio.to_thread(ours.recv)
        except EOFError:
            raise AphotonError("the server that was to be measured has failed") from None
        return await plan.measure("HTTP", completions(f"http://127.0.0.1:{port}"))
    finally:
        server.terminate()
        server.join()


def _serve_http(ready: Any, model: str, settings: dict[str, Any]) -> None:
    """In a process of its own: a server, until it is terminated."""
    import torch
    import uvicorn

    from aphoton_serve.local import LocalBackend
    from aphoton_serve.service import make_app

    torch.set_num_threads(THREADS)

    async def main() -> None:
        async with LocalBackend({NAME: model}, **settings) as backend:
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                config = uvicorn.Config(make_app(backend), log_config=None, access_log=False)
                listening.listen()  # whoever connects from now on is served
                ready.send(listening.getsockname()[1])
                with frozen_heap():  # as `aphoton serve` does
                    await uvicorn.Server(config).serve(sockets=[listening])

    asyncio.run(main())


def _through_ray(url: str, model: str, settings: dict[str, Any], plan: Plan) -> list[Figures]:
    from ray import serve

    from aphoton_serve.app import ModelArgs, ServiceArgs, application
    from aphoton_serve.keys import KeyRing

    found: list[Figures] = []
    for way, ingresses in (("Ray, endpoints apart", 1), ("Ray, endpoints in the replica", None)):
        args = [ModelArgs(model=f"{NAME}={model}", **settings)]
        serve.run(application(args, ServiceArgs(ingress_replicas=ingresses), KeyRing()))
        found += asyncio.run(plan.measure(way, completions(url)))
        serve.delete("default")
    return found


def _empty(url: str, plan: Plan) -> list[Figures]:
    """What Ray Serve takes to pass on events that cost nothing to make: through one deployment, and through two."""
    from ray import serve

    def deployed(name: str, kind: type[Any]) -> Any:
        return serve.deployment(name=name, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.1})(kind)

    async def ask(tokens: int) -> Reply:
        reply, _ = await post(url, f"/{tokens}", b"{}")
        return reply

    one: Any = deployed("speaker", serve.ingress()(Speaker)).bind(None)
    two: Any = deployed("speaker", serve.ingress()(Speaker)).bind(deployed("teller", Teller).bind())
    found: list[Figures] = []
    for way, application in (("Ray, empty, one hop", one), ("Ray, empty, two hops", two)):
        serve.run(application)
        found += asyncio.run(plan.measure(way, ask))
        serve.delete("default")
    return found


async def tell(count: int) -> AsyncIterator[bytes]:
    """Events, each after a turn of the loop."""
    for _ in range(count):
        yield EVENT
        await asyncio.sleep(0)


class Teller:
    """A deployment that tells events."""

    async def tell(self, count: int) -> AsyncIterator[bytes]:
        """So many."""
        async for event in tell(count):
            yield event


class Speaker:
    """A deployment that answers a path that is a number with as many events, its own or those of a `Teller`."""

    def __init__(self, teller: Any) -> None:
        self._tell = tell if teller is None else (lambda count: teller.options(stream=True).tell.remote(count))

    def __serve_build_asgi_app__(self) -> Any:  # Serve's name
        from starlette.applications import Starlette
        from starlette.routing import Mount

        async def app(scope: "Scope", receive: "Receive", send: "Send") -> None:
            while (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            async for event in self._tell(int(scope["path"].strip("/"))):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

        return Starlette(routes=[Mount("/", app)])


def _show(figures: list[Figures]) -> None:
    table = Table("way", "streams", "tok/s", "TTFT, ms", "events a stream")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in figures:
        table.add_row(one.way, str(one.streams), f"{one.tok_s:,.0f}", f"{one.ttft:.1f}", f"{one.events:g}")
    out.print(table)


def _show_course(course: Course) -> None:
    table = Table("from, s", "clients", "replicas", "requests", "failed", "TTFT, ms")
    for column in table.columns:
        column.justify = "right"
    for number, clients in enumerate(course.clients):
        begin, end = number * course.stage, (number + 1) * course.stage
        seen = [look.running for look in course.looks if begin <= look.at < end]
        sent = [one for one in course.arrivals if begin <= one.at < end]
        ttfts = [one.ttft for one in sent if one.ttft is not None]
        table.add_row(
            f"{begin:g}",
            str(clients),
            " to ".join(str(count) for count in dict.fromkeys((seen[0], seen[-1]))) if seen else "",
            str(len(sent)),
            str(len(sent) - len(ttfts)),
            f"{1e3 * median(ttfts):.0f}" if ttfts else "",
        )
    out.print(table)
