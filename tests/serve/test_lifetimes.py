"""Clients that go, queues that are full, and time that runs out."""

import asyncio
import logging
import random
import socket
from contextlib import suppress
from typing import Any

import msgspec
import openai
import pytest
from engine.waiting import idle, until
from rawclient import HEAD, RawClient
from sayer import let_sims_chat, saying
from serving import Served, serving
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aphoton_serve.local import LocalBackend
from aphoton_serve.settings import ServiceSettings

HI: list[Any] = [{"role": "user", "content": "Hi"}]
LONG = {"model": "endless", "messages": HI, "max_tokens": 900_000}


def running(served: Served) -> int:
    return served.engine("endless").stats().running


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_ends_its_request(hello: Served, stream: bool) -> None:
    engine = hello.engine("endless")
    client = await RawClient(hello.port).ask({**LONG, "stream": stream})
    await until(lambda: running(hello) == 1)
    if stream:
        assert b"200 OK" in await client.reader.readline()
    client.vanish()
    await idle(engine)
    metrics = (await hello.web.get("/metrics")).text
    assert 'aphoton_requests_total{model="endless",outcome="abort"} 1.0' in metrics


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("together", [True, False])
async def test_a_client_that_goes_and_had_said_more(hello: Served, stream: bool, together: bool) -> None:
    """A request behind the one that runs: it is dropped, and the connection is still listened to."""
    client = RawClient(hello.port)
    more = f"GET /health HTTP/1.1\r\n{HEAD}\r\n".encode()
    await client.ask({**LONG, "stream": stream}, more=more if together else b"")
    await until(lambda: running(hello) == 1)
    if not together:
        client.writer.write(more)
        await hello.web.get("/health")
    client.vanish()
    await idle(hello.engine("endless"))


@pytest.mark.parametrize("together", [True, False])
async def test_a_pipeline_is_answered_once(hello: Served, together: bool) -> None:
    client = RawClient(hello.port)
    more = f"GET /health HTTP/1.1\r\n{HEAD}\r\nGET /he".encode()
    await client.ask({**LONG, "max_tokens": 2000}, more=more if together else b"")
    if not together:
        await until(lambda: running(hello) == 1)
        client.writer.write(more)
    said = await client.reader.read()
    assert said.count(b"200 OK") == said.count(b"HTTP/1.1") == 1 and b'"completion_tokens":2000' in said
    client.writer.close()


async def test_an_answer_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed, and the answer let go of."""
    let_sims_chat(monkeypatch)
    backend = LocalBackend({"hello": saying("Hello")})
    async with serving(backend, ServiceSettings(body_timeout=0.1), send_buffer=4096) as served:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        body = b'{"model": "hello", "prompt": "%s"}' % (b"a" * 500_000)
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        writer.write(f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert b"200 OK" in await reader.readline()
        connections = served.server.server_state.connections
        assert len(connections) == 1
        await until(lambda: not connections)
        with suppress(ConnectionError):
            assert len(await reader.read()) < 500_000
        writer.close()


async def test_the_next_answer_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that began when a client was slow to read one answer is not the next one's."""
    let_sims_chat(monkeypatch)
    backend = LocalBackend({"hello": saying("Hello")})
    async with serving(backend, ServiceSettings(body_timeout=0.1), send_buffer=4096) as served:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 0.5:
            response = await served.web.post("/tokenize", json={"model": "hello", "prompt": "a" * 100_000})
            assert response.json()["count"] == 100_000


async def test_http_2_is_not_taken(hello: Served) -> None:
    """Java's client asks for it with each request that is not encrypted."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    response = await hello.web.post("/tokenize", json={"model": "endless", "prompt": "Hi"}, headers=headers)
    assert response.status_code == 200 and response.json()["count"] == 2


@pytest.mark.parametrize(
    ("head", "status"),
    [("X: " + "a" * 1_000_000, b"431 "), ("a:\r\n" * 250_000, b"400 "), ("a: b\r\n" * 100 + "\r\n", b"200 ")],
)
async def test_a_head_has_a_size(hello: Served, head: str, status: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hello.port)
    writer.write(f"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}".encode())
    with suppress(ConnectionError):
        assert (await reader.readline()).split(b" ", 1)[1].startswith(status)
        await reader.read()
    writer.close()


async def test_within_two_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the moment when the server's transport has heard of it. A step takes some turns of the loop, as on
    any real device."""
    let_sims_chat(monkeypatch)
    heard: list[int] = []
    model = msgspec.structs.replace(saying("la ", end=False, max_model_len=1_000_000), turns=(4,))
    backend = LocalBackend({"endless": model}, max_rows=4, kv_pages=100_000)
    lost = HttpToolsProtocol.connection_lost

    def connection_lost(self: HttpToolsProtocol, error: Exception | None) -> None:
        heard.append(backend.engine("endless").stats().steps)
        lost(self, error)

    monkeypatch.setattr(HttpToolsProtocol, "connection_lost", connection_lost)
    async with serving(backend) as served:
        for stream in (True, False):
            client = await RawClient(served.port).ask({**LONG, "stream": stream})
            await until(lambda: running(served) == 1)
            heard.clear()
            client.vanish()
            await until(lambda: running(served) == 0)
            assert backend.engine("endless").stats().steps - heard[0] <= 2


async def test_crowds_that_vanish(hello: Served) -> None:
    """At random moments, beside a stream that must not notice."""
    rng = random.Random(5)
    alone = await hello.ai.completions.create(model="endless", prompt="\x02", max_tokens=3000)
    steady = asyncio.create_task(hello.ai.completions.create(model="endless", prompt="\x02", max_tokens=3000))

    async def one(stream: bool, lines: int) -> None:
        client = await RawClient(hello.port).ask({**LONG, "stream": stream})
        if stream:
            with suppress(ConnectionError):
                for _ in range(lines):
                    await client.reader.readline()
        client.vanish()

    for _ in range(5):
        await asyncio.gather(*(one(rng.random() < 0.6, rng.randrange(40)) for _ in range(20)))
    assert (await steady).choices[0].text == alone.choices[0].text
    await idle(hello.engine("endless"))


async def test_a_stream_that_is_left(hello: Served) -> None:
    async with await hello.ai.chat.completions.create(**LONG, stream=True) as stream:
        async for _ in stream:
            break
    await idle(hello.engine("endless"))


async def test_a_full_queue(hello: Served) -> None:
    clients = [await RawClient(hello.port).ask(LONG) for _ in range(8)]  # four run, four wait
    engine = hello.engine("endless")
    await until(lambda: engine.stats().running == 4 and engine.stats().waiting == 4)
    response = await hello.web.post("/v1/chat/completions", json={**LONG, "stream": True})
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "overloaded"
    with pytest.raises(openai.RateLimitError):
        await hello.ai.chat.completions.create(**LONG)
    for client in clients:
        client.vanish()
    await idle(engine)


async def test_several_prompts_end_together(hello: Served) -> None:
    """One too many for the queue: the others end, too."""
    response = await hello.web.post(
        "/v1/completions", json={"model": "endless", "prompt": ["\x02"] * 12, "max_tokens": 900_000}
    )
    assert response.status_code == 429
    await idle(hello.engine("endless"))


@pytest.mark.parametrize("stream", [True, False])
async def test_time_runs_out(hello: Served, stream: bool) -> None:
    headers = {"X-Request-Timeout": "0.3"}
    if stream:
        with pytest.raises(openai.APIError, match=r"has taken 0\.3 s") as late:
            async for _ in await hello.ai.chat.completions.create(**LONG, stream=True, extra_headers=headers):
                pass
        assert late.value.code == "timeout"
    else:
        with pytest.raises(openai.InternalServerError) as over:
            await hello.ai.chat.completions.create(**LONG, extra_headers=headers)
        assert over.value.status_code == 504 and over.value.code == "timeout"
    await idle(hello.engine("endless"))
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        response = await hello.web.post("/v1/chat/completions", json=LONG, headers={"X-Request-Timeout": wrong})
        assert response.status_code == 400 and "must be a number of seconds" in response.text
        for _ in range(2):
            response = await hello.web.get("/v1/models/endless", headers={"X-Request-Timeout": wrong})
            assert response.status_code == 400, "what has been asked before is no exception"


async def test_a_client_that_reads_nothing(sims: None) -> None:
    """What it does not take waits in the engine, not in the server; its time runs out, and nothing is left."""
    backend = LocalBackend({"endless": saying("la " * 100, end=False, max_model_len=10_000_000)}, kv_pages=700_000)
    async with serving(backend, ServiceSettings(request_timeout=1.0)) as served:
        client = await RawClient(served.port).ask({**LONG, "max_tokens": 9_000_000, "stream": True})
        await until(lambda: running(served) == 1)
        await until(lambda: running(served) == 0)
        await idle(served.engine("endless"))
        client.vanish()


async def test_a_body_that_does_not_come(sims: None) -> None:
    settings = ServiceSettings(body_timeout=0.2)
    async with serving(LocalBackend({"m": saying("ok")}, kv_pages=10_000), settings) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 9\r\n\r\n{{".encode())
        assert b"408" in await reader.readline()
        writer.close()


async def test_a_client_that_goes_while_it_sends(hello: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody's fault: one line says so."""
    caplog.set_level(logging.INFO, "aphoton.serve")
    _, writer = await asyncio.open_connection("127.0.0.1", hello.port)
    writer.write(f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 50\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await until(lambda: any("/tokenize" in record.getMessage() for record in caplog.records))
    (line,) = caplog.records
    assert " 499 " in line.getMessage() and line.exc_info is None


async def test_an_engine_that_is_stuck(sims: None) -> None:
    """A step does not finish: the process lives, and the engine is not well."""
    gate = asyncio.Event()
    backend = LocalBackend({"m": saying("la ", end=False)}, kv_pages=10_000, tick_timeout=0.2)
    async with serving(backend) as served:
        pipeline = served.engine("m")._pipeline
        assert pipeline is not None
        results = pipeline.device.results

        async def stuck(slot: int) -> Any:
            await gate.wait()
            return await results(slot)

        pipeline.device.results = stuck  # type: ignore[method-assign]
        assert (await served.web.get("/health")).json() == {"status": "ok", "models": {"m": "ok"}}
        client = await RawClient(served.port).ask({"model": "m", "messages": HI, "max_tokens": 50})
        while (response := await served.web.get("/health")).status_code == 200:
            pass
        assert response.status_code == 503
        assert "no step has finished for" in response.json()["models"]["m"]
        gate.set()
        assert b"200" in await client.reader.readline()
        assert (await served.web.get("/health")).status_code == 200
        client.vanish()


async def test_the_end_of_the_server(sims: None) -> None:
    """Who is being answered is told that it is over."""
    backend = LocalBackend({"endless": saying("la ", end=False, max_model_len=1_000_000)}, kv_pages=100_000)
    async with serving(backend) as served:
        stream = await served.ai.chat.completions.create(**LONG, stream=True)
        await anext(stream)
        await backend.aclose()
        with pytest.raises(openai.APIError, match="the engine is not running"):
            async for _ in stream:
                pass
        response = await served.web.post("/v1/chat/completions", json=LONG)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert (await served.web.get("/health")).json()["models"] == {"endless": "EngineClosed"}
        assert 'aphoton_engine_up{model="endless"} 0.0' in (await served.web.get("/metrics")).text


async def test_a_request_without_a_body(hello: Served) -> None:
    assert (await hello.web.post("/v1/chat/completions")).status_code == 415
