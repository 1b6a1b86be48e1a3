"""`Intake`: what all endpoints do with a request before they answer it."""

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from aphoton_serve.attendance import ClientGone, attended
from aphoton_serve.backend import Backend, ModelCard
from aphoton_serve.body import CLIENT_GONE, decode, read_body
from aphoton_serve.errors import ApiError
from aphoton_serve.messages import text_length
from aphoton_serve.naming import with_adapter
from aphoton_serve.protocol_responses import encode
from aphoton_serve.settings import ServiceSettings
from aphoton_serve.sse import Emit, EventStream, timed_out

__all__ = ["Intake"]

T = TypeVar("T")

TIMEOUT_HEADER = "x-request-timeout"


class Intake:
    """Reads requests to a backend, and runs what answers them while the client waits."""

    def __init__(self, backend: Backend, settings: ServiceSettings) -> None:
        self.backend = backend
        self._settings = settings
        self._cards: dict[str, ModelCard] = {}

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body of a request as a ``kind``.

        :raises ApiError: when it is none, or too large.
        """
        settings = self._settings
        body = await read_body(request, limit=settings.max_body_bytes, seconds=settings.body_timeout)
        return decode(body, kind)

    async def card(self, request: Request, model: str) -> ModelCard:
        """What a request's model is, which may have to be started for that, while the client waits.

        :raises ApiError: 404, when there is no such model, 400 for an adapter of one (``BASE:ADAPTER``), 504, when it
            takes too long, and 499 when the client goes, for the log.
        """
        timeout = self._timeout(request)
        if model in self._cards:  # a model does not change, and asking has started a replica
            return self._cards[model]
        found = with_adapter(model, self.backend.names)
        if found is not None:
            raise ApiError(
                400, f"the model {found[0]!r:.200} takes no adapters", param="model", code="unsupported_adapter"
            )
        try:
            card = await attended(request.receive, lambda: self.backend.card(model), seconds=timeout)
        except ClientGone:
            raise ApiError(CLIENT_GONE, "the client has gone") from None
        except TimeoutError:
            raise timed_out(timeout) from None
        self._cards[model] = card
        return card

    def check_prompt(self, field: str, prompt: Any) -> None:
        """:raises ApiError: 400, for more characters than a request may have."""
        length, most = text_length(prompt), self._settings.max_prompt_chars
        if length > most:
            raise ApiError(
                400,
                f"{field} has {length} characters, and may have {most}",
                param=field,
                code="string_above_max_length",
            )

    def check_choices(self, prompts: int, each: int) -> None:
        """:raises ApiError: 400, for more answers than a request may ask for, and for none."""
        if each < 1:
            raise ApiError(400, f"n must be at least 1, not {each}", param="n", code="invalid_value")
        most = self._settings.max_choices
        if prompts * each > most:
            raise ApiError(
                400,
                f"{prompts} prompts with {each} answers each are more than {most} answers",
                param="n" if each > 1 else "prompt",
                code="invalid_value",
            )

    async def answer(self, request: Request, work: Callable[[], Awaitable[Any]]) -> Response:
        """What ``work`` gives, as JSON. It is cancelled when the client goes.

        :raises ApiError: 504, when it takes too long, and whatever ``work`` raises.
        """
        timeout = self._timeout(request)
        try:
            body = await attended(request.receive, work, seconds=timeout)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except TimeoutError:
            raise timed_out(timeout) from None
        return Response(encode(body), media_type="application/json")

    def events(self, request: Request, make: Callable[[Emit], Awaitable[None]]) -> Response:
        """What ``make`` emits, as it comes."""
        return EventStream(make, timeout=self._timeout(request))

    def _timeout(self, request: Request) -> float:
        asked = request.headers.get(TIMEOUT_HEADER)
        if asked is None:
            return self._settings.request_timeout
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise ApiError(
                400, f"{TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER, code="invalid_value"
            )
        return min(seconds, self._settings.request_timeout)
