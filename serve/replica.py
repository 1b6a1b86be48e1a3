"""`EngineReplica`: one engine in an actor of its own, as Ray Serve runs it."""

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from ray import serve

from aphoton.heap import frozen_heap
from aphoton_serve.backend import Answer, Family, Job, ModelCard, Part, Ticks
from aphoton_serve.errors import Problem, describe
from aphoton_serve.keys import KeyRing
from aphoton_serve.pacing import PacedBackend
from aphoton_serve.scaling import KV_USE
from aphoton_serve.service import make_app
from aphoton_serve.settings import ServiceSettings

__all__ = ["EngineReplica", "ServiceReplica"]

T = TypeVar("T")


class EngineReplica:
    """Does for other actors what `PacedBackend` does for its own process.

    What goes wrong with a request is an answer, too (`Problem`): an exception that crosses actors comes out as another
    one, with this actor's traceback in its message.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, name: str, model: str, settings: dict[str, Any], *, tick_timeout: float
    ) -> None:
        """Loads the model: Serve gives a replica the time that this takes."""
        self._name = name
        self._backend = PacedBackend({name: model}, tick_timeout=tick_timeout, **settings)
        self._frozen = ExitStack()
        await self._backend.start()
        self._frozen.enter_context(frozen_heap())

    async def card(self) -> ModelCard:
        """What this model is."""
        return await self._backend.card(self._name)

    async def stream(self, job: Job) -> AsyncIterator[Part | Problem]:
        """The answers to a job, part by part, and no more often than it pays."""
        stream = None
        try:
            stream = self._backend.stream(self._name, job)
            async for part in stream:
                yield part
        except Exception as error:
            yield describe(error)
        finally:
            if stream is not None:
                await stream.aclose()

    async def complete(self, job: Job) -> Answer | Problem:
        """The answers to a job, when all have ended."""
        return await _told(self._backend.complete(self._name, job))

    async def tokenize(self, text: str) -> list[int] | Problem:
        """The token ids of ``text`` as a prompt."""
        return await _told(self._backend.tokenize(self._name, text))

    async def detokenize(self, ids: Sequence[int]) -> str | Problem:
        """The text of ``ids``."""
        return await _told(self._backend.detokenize(self._name, ids))

    async def metrics(self) -> tuple[str, list[Family]]:
        """Serve's id of this replica, and what it shows to Prometheus."""
        return serve.get_replica_context().replica_id.unique_id, await self._backend.metrics()

    async def ticks(self) -> Ticks | Problem:
        """What the engine has done lately."""
        return await _told(self._backend.ticks(self._name))

    async def health(self) -> str | None:
        """What is wrong with the engine; None when nothing is."""
        return (await self._backend.health())[self._name]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, for `replicas_wanted`."""
        stats = self._backend.engine(self._name).stats()
        return {KV_USE: stats.pages_used / (stats.pages_free + stats.pages_cached + stats.pages_used)}

    async def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises.

        :raises RuntimeError: when the engine is dead, or stuck.
        """
        wrong = await self.health()
        if wrong is not None:
            raise RuntimeError(f"the engine of {self._name} is not well: {wrong}")

    async def __del__(self) -> None:
        """Called by Serve once the requests have ended, or their time is over."""
        self._frozen.close()
        await self._backend.aclose()


class ServiceReplica(EngineReplica):
    """One engine, and the endpoints over it, in one actor: what it says goes to Serve's proxy through no other."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, name: str, model: str, settings: dict[str, Any], service: ServiceSettings, keys: KeyRing
    ) -> None:
        """Loads the model."""
        await super().__init__(name, model, settings, tick_timeout=service.tick_timeout)
        self._app = make_app(self._backend, service, keys=keys)

    def __serve_build_asgi_app__(self) -> Any:  # Serve's name
        return self._app


async def _told(work: Awaitable[T]) -> T | Problem:
    try:
        return await work
    except Exception as error:
        return describe(error)
