"""`Gate`: who may pass, and what is noted of whom."""

import logging
import re
import time
import uuid
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aphoton_serve.errors import ApiError, describe, problem_response
from aphoton_serve.keys import KeyRing
from aphoton_serve.limiter import Limiter

__all__ = ["Gate"]

log = logging.getLogger("aphoton.serve")

OPEN = ("/", "/health")
"""Paths that need no key: a page without data, and what a cluster's probes ask."""
ANYBODY = "anybody"
"""The name of whoever comes when there are no keys."""
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNLIMITED = ("GET", "HEAD", "OPTIONS")
"""Methods that start nothing."""


class Gate:
    """Stands before the application: host name, API key and limits, a request's id, one line of log, and an error
    object for whatever escapes.

    The log has the key's name and never a header or a body.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing, limiter: Limiter, hosts: tuple[str, ...]) -> None:
        """:param hosts: names by which this server may be called; empty: any."""
        self._app = app
        self._keys = keys
        self._limiter = limiter
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(id):
            id = uuid.uuid4().hex
        began = time.monotonic()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"] = id
                added["x-content-type-options"] = "nosniff"
            await send(message)

        name = "-"
        try:
            with ExitStack() as stack:
                self._check_host(headers)
                name = self._name(scope, headers)
                if scope["method"] not in UNLIMITED:
                    stack.enter_context(self._limiter.hold(name))
                await self._app(scope, receive, answer)
        except Exception as error:
            if status:  # too late to say anything
                log.error("%s failed while it was answered", id, exc_info=error)
                return
            await problem_response(describe(error))(scope, receive, answer)
        finally:
            # The path is the client's own text: as a literal it stays one line.
            took = time.monotonic() - began
            log.info("%s %s %s %.200r %s %.3f s", id, name, scope["method"], scope["path"], status or "-", took)

    def _check_host(self, headers: Headers) -> None:
        """A page elsewhere can make a browser call this machine under a name of the page's own (DNS rebinding)."""
        host = headers.get("host", "").lower()
        bare = host[: host.rindex("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        if self._hosts and bare not in self._hosts:
            raise ApiError(403, "this server is not called by that name", code="unknown_host")

    def _name(self, scope: Scope, headers: Headers) -> str:
        """Whose request it is.

        :raises ApiError: 401, without a key where one is needed.
        """
        if not len(self._keys):
            return ANYBODY
        if scope["path"] in OPEN:
            return "-"
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise ApiError(401, "You didn't provide an API key: send Authorization: Bearer KEY", code="missing_api_key")
        name = self._keys.name_of(key.strip())
        if name is None:
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return name
