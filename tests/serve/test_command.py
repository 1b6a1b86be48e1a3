"""``aphoton serve``, as a program of its own."""

import asyncio
import re
import signal
import socket
import sys
from contextlib import AbstractAsyncContextManager

import httpx
import openai
import pytest
from anyio import EndOfStream
from program import Program, program
from typer.testing import CliRunner

from aphoton import InvalidRequest
from aphoton.cli.app import app
from aphoton_serve.naming import names_of

RUNNING = re.compile(r"running on (http://[\w.]+:\d+)")


def served(*arguments: str, **environment: str) -> AbstractAsyncContextManager[Program]:
    command = [sys.executable, "-m", "aphoton", "serve", "--port", "0", "--device", "cpu", *arguments]
    return program(*command, **environment)


async def test_serves_and_lets_the_last_stream_end() -> None:
    async with served("tiny=random:tiny", "--max-rows", "4", APHOTON_API_KEYS="me=sk-very-secret") as it:
        url = await it.expect(RUNNING)
        assert url.startswith("http://127.0.0.1:")
        async with httpx.AsyncClient() as web:
            assert (await web.get(f"{url}/health")).json()["models"] == {"tiny": "ok"}
            assert (await web.get(f"{url}/v1/models")).status_code == 401
            assert (await web.get(f"{url}/health", headers={"host": "evil.example"})).status_code == 403
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-very-secret", max_retries=0) as ai:
            stream = await ai.completions.create(
                model="tiny", prompt="Hi", max_tokens=1000, stream=True, stream_options={"include_usage": True}
            )
            await anext(stream)
            it.process.send_signal(signal.SIGTERM)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 1000
        await it.process.wait()
        assert "Traceback" not in it.text and "sk-very-secret" not in it.text


@pytest.mark.parametrize("grace", ["0", "0.3"])
async def test_who_outlasts_the_grace_is_told(grace: str) -> None:
    own = ["m=random:tiny", "--grace", grace, "--host", "127.0.0.2"]
    async with served(*own) as it:
        url = await it.expect(RUNNING)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as ai:
            ask = {"model": "m", "prompt": "Hi", "max_tokens": 90_000, "extra_body": {"ignore_eos": True}}
            stream = await ai.completions.create(**ask, stream=True)
            await anext(stream)
            whole = asyncio.create_task(ai.completions.create(**ask))
            async with httpx.AsyncClient() as web:
                while 'aphoton_requests_running{model="m"} 2.0' not in (await web.get(f"{url}/metrics")).text:
                    pass
            half, writer = await asyncio.open_connection("127.0.0.2", httpx.URL(url).port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1")
            it.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="the engine is not running"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError, match="the engine is not running"):
                await whole
            assert b"500" not in await half.read()
            writer.close()
        await it.process.wait()
        assert "Traceback" not in it.text


async def test_whoever_is_there_at_the_end_has_an_answer() -> None:
    """A crowd that is done at the same time, and somebody whose request has not come yet."""
    async with served("m=random:tiny", "--max-rows", "32") as it:
        url = httpx.URL(await it.expect(RUNNING))
        body = b'{"model": "m", "prompt": "Hi", "max_tokens": 3}'
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body[:9])
        ask = {"model": "m", "prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "logprobs": 2}
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as web:
            asking = [asyncio.create_task(web.post("/v1/completions", json=ask)) for _ in range(32)]
            while 'aphoton_requests_running{model="m"} 32.0' not in (await web.get("/metrics")).text:
                pass
            it.process.send_signal(signal.SIGTERM)
            await it.expect(re.compile("(Shutting down)"))
            writer.write(body[9:])
            assert b"200 OK" in await reader.read()
            writer.close()
            assert {(await each).status_code for each in asking} == {200}
        await it.process.wait()
        assert "Traceback" not in it.text


async def test_whoever_does_not_say_what_they_want_is_hung_up_on() -> None:
    """At once, with half a head, behind a request that was answered; and not while a request is answered."""
    async with served("m=random:tiny", "--body-timeout", "0.5") as it:
        url = httpx.URL(await it.expect(RUNNING))
        head = f"GET /health HTTP/1.1\r\nHost: {url.host}\r\n"
        for said, answers in (("", 0), (head, 0), (f"{head}\r\n{head}", 1)):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(said.encode())
            assert (await reader.read()).count(b"200 OK") == answers
            writer.close()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as ai:
            stream = await ai.completions.create(
                model="m", prompt="Hi", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            begun = asyncio.get_running_loop().time()
            parts = [chunk.choices[0].finish_reason async for chunk in stream]
            assert parts[-1] == "length" and asyncio.get_running_loop().time() > begun + 0.5


async def test_a_model_that_is_not_there() -> None:
    async with served("no-such-model") as it:
        with pytest.raises(EndOfStream):
            await it.expect(RUNNING)
        assert "there is no file or folder 'no-such-model'" in it.text and "Traceback" not in it.text
        assert await it.process.wait() == 1


def test_what_cannot_be_is_refused_before_anything_is_loaded() -> None:
    for arguments, message in (
        (["a=x", "a=y"], "two are named 'a'"),
        (["=x"], "must be NAME=MODEL"),
        (["x", "--max-rows", "0"], "max_rows: must be from 1"),
        (["x", "--grace", "1e7"], "grace: must be in"),
        (["x", "--request-timeout", "0"], "request_timeout: must be in"),
        (["x", "--api-keys-file", "/no/such/file"], "/no/such/file: No such file"),
        (["x", "--ray", "--port", "0"], "there is no file or folder 'x'"),
        (["x", "--host", "no such host"], "host: no such host cannot be listened on"),
    ):
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code in (1, 2) and message in result.stderr, result.output


@pytest.mark.parametrize("more", [[], ["--ray"]])
def test_a_port_that_is_taken(more: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "no-such-model", "--port", str(port), *more])
    assert result.exit_code in (1, 2) and f"port: {port} is in use on 127.0.0.1" in result.stderr, result.output


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(app, ["serve", "random:tiny"])
    assert result.exit_code == 1 and "pip install 'aphoton[serve]'" in result.stderr


def test_names() -> None:
    assert names_of(["org/name", "/models/folder/", "a=random:tiny", "b=x=y"]) == {
        "name": "org/name",
        "folder": "/models/folder/",
        "a": "random:tiny",
        "b": "x=y",
    }
    with pytest.raises(InvalidRequest, match="two are named"):
        names_of(["org/name", "other/name"])
