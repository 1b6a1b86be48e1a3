"""`RemoteBackend`: engines in deployments of Ray Serve."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, TypeVar

from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from aphoton_serve.backend import Answer, Family, Job, ModelCard, Part, Ticks, unknown_model
from aphoton_serve.errors import ApiError, Problem
from aphoton_serve.metrics import merge

__all__ = ["RemoteBackend", "RemoteStream"]

log = logging.getLogger("aphoton.serve")

T = TypeVar("T")

REPLICAS_ANSWER = 5.0
"""Seconds that replicas have to tell of themselves."""


class RemoteBackend:
    """Handles of deployments of `EngineReplica`, by model name."""

    def __init__(self, handles: Mapping[str, Any], sleepers: Collection[str] = ()) -> None:
        """
        :param handles: Ray's ``DeploymentHandle``.
        :param sleepers: models that may have no replica while nobody asks for them.
        """
        self._handles = dict(handles)
        self._sleepers = frozenset(sleepers)

    @property
    def names(self) -> list[str]:
        return list(self._handles)

    async def card(self, model: str) -> ModelCard:
        card: ModelCard = await _call(self._handle(model).card)
        return card

    def stream(self, model: str, job: Job) -> "RemoteStream":
        return RemoteStream(self._handle(model), job)

    async def complete(self, model: str, job: Job) -> Answer:
        answer: Answer = await _call(self._handle(model).complete, job)
        return answer

    async def tokenize(self, model: str, text: str) -> list[int]:
        ids: list[int] = await _call(self._handle(model).tokenize, text)
        return ids

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        text: str = await _call(self._handle(model).detokenize, ids)
        return text

    async def health(self) -> dict[str, str | None]:
        """Of each model's replicas. One scaled to zero is well: a request starts one."""
        found: dict[str, str | None] = {}
        for name in self._handles:
            try:
                wrong = [one for one in await self._of_all(name, "health") if one is not None]
                found[name] = wrong[0] if wrong else None
            except Exception as error:
                log.warning("the replicas of %s do not answer: %s", name, error)
                found[name] = "its replicas do not answer"
        return found

    async def metrics(self) -> list[Family]:
        """Of all replicas that answer. Serve's id of each is a label: another replica's figures are another series."""
        sources: list[tuple[dict[str, str], list[Family]]] = []
        for name in self._handles:
            try:
                replicas = await self._of_all(name, "metrics")
            except (RayError, DeploymentUnavailableError, TimeoutError) as error:
                log.warning("the replicas of %s do not answer: %s", name, error)
                continue
            sources += [({"replica": replica}, families) for replica, families in replicas]
        return merge(sources)

    async def ticks(self, model: str) -> Ticks:
        """Of one replica."""
        ticks: Ticks = await _call(self._handle(model).ticks)
        return ticks

    def _handle(self, model: str) -> Any:
        try:
            return self._handles[model]
        except KeyError:
            raise unknown_model(model) from None

    async def _of_all(self, name: str, method: str) -> list[Any]:
        response = self._handles[name].broadcast(method)
        try:
            return list(await response.results_async(timeout_s=REPLICAS_ANSWER))
        except DeploymentUnavailableError:  # there are none
            if name in self._sleepers:
                return []
            raise


class RemoteStream:
    """A request to a replica, as parts."""

    def __init__(self, handle: Any, job: Job) -> None:
        self._handle = handle
        self._job = job
        self._parts: Any = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        if self._ended:
            raise StopAsyncIteration
        try:
            if self._parts is None:
                self._parts = self._handle.options(stream=True).stream.remote(self._job)
            part: Part = _checked(await anext(self._parts))
        except (RayError, BackPressureError, DeploymentUnavailableError) as error:
            self._ended = True
            raise _told(error) from None
        self._ended = part.usage is not None
        return part

    async def aclose(self) -> None:
        if self._parts is not None and not self._ended:
            self._parts.cancel()
        self._ended = True


async def _call(method: Any, *arguments: Any) -> Any:
    """What a replica answers.

    :raises ApiError: what it says that went wrong, or Serve.
    """
    try:
        response = method.remote(*arguments)
        try:
            return _checked(await response)
        except asyncio.CancelledError:
            response.cancel()  # the replica's request does not end by itself
            raise
    except (RayError, BackPressureError, DeploymentUnavailableError) as error:
        raise _told(error) from None


def _checked(answer: T | Problem) -> T:
    if isinstance(answer, Problem):
        raise ApiError.of(answer)
    return answer


def _told(error: Exception) -> ApiError:
    if isinstance(error, BackPressureError):
        return ApiError(
            429,
            "the queue is full: try again later",
            kind="rate_limit_error",
            code="overloaded",
            retry_after=1,
        )
    if isinstance(error, RayActorError | DeploymentUnavailableError | TaskCancelledError):
        log.warning("a replica was lost: %s", type(error).__name__)
        message, code = "the replica that served this request was lost: try again", "replica_lost"
        return ApiError(503, message, kind="server_error", code=code, retry_after=1)
    log.error("a call to a replica failed", exc_info=error)
    return ApiError(500, "the server had an error", kind="server_error", code="internal_error")
