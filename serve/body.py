"""Request bodies: read within limits, decoded, and told apart from what is none."""

import re
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request

from aphoton_serve.errors import ApiError

__all__ = ["CLIENT_GONE", "decode", "read_body"]

CLIENT_GONE = 499
"""nginx's status for the log: nobody reads the answer."""

T = TypeVar("T")

MAX_PARTS = 100_000
"""Brackets that begin lists and objects, or stand in a text: they are not told apart. Lists and objects take Python's
time, most of all the garbage collector's: 1.3 million, which are 4 MB, took a second of the loop's."""

UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
WHERE = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)
MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`(?: - at `\$\.?(?P<path>.*)`)?$")


async def read_body(request: Request, *, limit: int, seconds: float) -> bytes:
    """The whole body.

    Only ``application/json`` is taken: any web page may make a browser send a form or plain text to a server on the
    same machine, but not JSON, for which the browser asks the server first.

    :raises ApiError: 413 for more than ``limit`` bytes, 408 when it has not come after that many ``seconds``, 415, and
        499 when the client goes, for the log.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
    too_large = ApiError(413, f"the request is larger than {limit} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    body = bytearray()
    with anyio.move_on_after(seconds) as scope:
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
        except ClientDisconnect:
            raise ApiError(CLIENT_GONE, "the client has gone") from None
    if scope.cancelled_caught:
        raise ApiError(408, f"the request did not arrive within {seconds:g} s", code="timeout")
    return bytes(body)


def decode(body: bytes, kind: type[T]) -> T:
    """The body as a ``kind``.

    :raises ApiError: 400, which names the argument; 413 for too many lists and objects.
    """
    if body.count(b"[") + body.count(b"{") > MAX_PARTS:
        raise ApiError(413, f"the request has more than {MAX_PARTS} brackets, [ and {{", code="request_too_large")
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            if UNKNOWN.match(str(error)) is None:
                raise
        # Something unknown: it may be null, which asks for nothing. This way is slower, and rare.
        return msgspec.convert(_without_nulls(msgspec.json.decode(body)), type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error) from None
    except RecursionError:
        raise ApiError(400, "the request is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request is not valid JSON: {error}", code="invalid_json") from None


def _without_nulls(body: Any) -> Any:
    return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body


def _refusal(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    if match := UNKNOWN.match(text):
        name = _join(match["path"], match["name"][:100])
        return ApiError(400, f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
    if match := MISSING.match(text):
        name = _join(match["path"], match["name"])
        return ApiError(400, f"Missing required argument: {name}", param=name, code="missing_required_parameter")
    match = WHERE.match(text)
    assert match is not None
    path, what = match["path"], match["what"][:300]
    if not path:
        return ApiError(400, f"the request is not what it must be: {what}", code="invalid_type")
    return ApiError(400, f"Invalid value for {path[:100]}: {what}", param=path[:100], code="invalid_type")


def _join(path: str | None, name: str) -> str:
    return f"{path}.{name}" if path else name
