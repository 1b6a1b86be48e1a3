"""`Ask`: a client for what is measured, that costs next to nothing: it shares the machine with the server."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from aphoton import AphotonError

__all__ = ["DONE", "NAME", "PROMPT", "Ask", "Reply", "completions", "post"]

NAME = "model"
"""By which a model is offered."""
PROMPT = "Once upon a time there was a photon."
DONE = b"data: [DONE]\n\n"


class Reply(msgspec.Struct, frozen=True):
    """What one stream was: seconds until its first event and until its end, and how many events it had."""

    first: float
    whole: float
    events: int


Ask = Callable[[int], Awaitable[Reply]]
"""Has one stream of so many tokens, or events.

:raises AphotonError: when it was answered with anything else.
"""


def completions(url: str) -> Ask:
    """Streams of the model `NAME` from a server."""

    async def ask(tokens: int) -> Reply:
        body = {
            "model": NAME,
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply, tail = await post(url, "/v1/completions", msgspec.json.encode(body))
        if f'"completion_tokens":{tokens}'.encode() not in tail:
            raise AphotonError(f"a stream ended early: {tail!r}")
        return reply

    return ask


async def post(url: str, path: str, body: bytes) -> tuple[Reply, bytes]:
    """A stream and its last bytes.

    :raises AphotonError: when it has no end.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        first, events, tail = 0.0, 0, b""
        while data := await reader.read(1 << 16):
            events += data.count(b"data: ")
            if events and not first:
                first = time.perf_counter() - began
            tail = (tail + data)[-2000:]
        if DONE not in tail:
            raise AphotonError(f"the server answered {tail!r}")
        return Reply(first, time.perf_counter() - began, events - 1), tail
    finally:
        writer.close()
