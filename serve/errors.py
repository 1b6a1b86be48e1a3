"""`Problem`: what went wrong, in the form in which OpenAI's API says it."""

import logging

import msgspec
from starlette.responses import Response

from aphoton import (
    AphotonError,
    ConstraintFailed,
    DeadlineExceeded,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    PromptTooLong,
)

__all__ = ["ApiError", "Problem", "describe", "problem_response"]

log = logging.getLogger("aphoton.serve")

RETRY_SECONDS = 1
"""After which a full queue may have room."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error of the API.

    :ivar status: of the HTTP response.
    :ivar kind: OpenAI's ``type``.
    :ivar param: the argument at fault.
    :ivar code: for programs.
    :ivar retry_after: seconds after which to try again.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def body(self) -> bytes:
        """The error object, as JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class ApiError(Exception):
    """Ends a request with a `Problem`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(
            status=status, message=message, kind=kind, param=param, code=code, retry_after=retry_after
        )

    @classmethod
    def of(cls, problem: Problem) -> "ApiError":
        """The exception for a problem that came from elsewhere."""
        fields = msgspec.structs.asdict(problem)
        return cls(fields.pop("status"), fields.pop("message"), **fields)


def describe(error: Exception) -> Problem:
    """What to tell a client of any exception.

    What is not the client's own doing is logged here in full and told without details: messages of faults may hold
    paths and addresses.
    """
    match error:
        case ApiError():
            return error.problem
        case PromptTooLong():
            return Problem(status=400, message=str(error), param=error.field, code="context_length_exceeded")
        case InvalidRequest():
            return Problem(status=400, message=str(error), param=error.field, code="invalid_value")
        case ConstraintFailed():  # what was asked for, and tokens may have come: it is told here all the same
            return Problem(status=400, message=str(error), param=error.field, code="constraint_failed")
        case EngineOverloaded():
            return Problem(
                status=429,
                message="the queue is full: try again later",
                kind="rate_limit_error",
                code="overloaded",
                retry_after=RETRY_SECONDS,
            )
        case DeadlineExceeded():
            return Problem(status=504, message=str(error), kind="server_error", code="timeout")
        case EngineDead():
            log.error("a request to an engine that has died: %s", error)
            return Problem(status=503, message="the engine has died", kind="server_error", code="engine_dead")
        case EngineClosed():
            return Problem(
                status=503,
                message="the engine is not running",
                kind="server_error",
                code="engine_closed",
                retry_after=RETRY_SECONDS,
            )
        case RecursionError():
            return Problem(status=400, message="the request is nested too deeply", code="invalid_json")
        case AphotonError():
            log.error("a request failed: %s", error)
        case _:
            log.error("a request failed", exc_info=error)
    return Problem(status=500, message="the server had an error", kind="server_error", code="internal_error")


def problem_response(problem: Problem) -> Response:
    """The HTTP response that says it."""
    headers = {} if problem.retry_after is None else {"retry-after": str(problem.retry_after)}
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(problem.body(), problem.status, headers, "application/json")
