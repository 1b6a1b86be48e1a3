"""`EngineReplica`: one engine in an actor of its own, as Ray Serve runs it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from aphoton_serve.backend import Answer, Family, Job, ModelCard, Part, Ticks
from aphoton_serve.errors import Problem, describe
from aphoton_serve.local import LocalBackend

__all__ = ["EngineReplica"]

T = TypeVar("T")


class EngineReplica:
    """Does for other actors what `LocalBackend` does for its own process.

    What goes wrong with a request is an answer, too (`Problem`): an exception that crosses actors comes out as another
    one, with this actor's traceback in its message.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, name: str, model: str, settings: dict[str, Any], *, tick_timeout: float, merge: float
    ) -> None:
        """Loads the model: Serve gives a replica the time that this takes.

        :param merge: seconds between two parts of an answer: what comes meanwhile goes together. The first goes at
            once. A message between actors costs far more than a token.
        """
        self._name = name
        self._merge = merge
        self._backend = LocalBackend({name: model}, tick_timeout=tick_timeout, **settings)
        await self._backend.start()

    async def card(self) -> ModelCard:
        """What this model is."""
        (card,) = await self._backend.models()
        return card

    async def stream(self, job: Job) -> AsyncIterator[Part | Problem]:
        """The answers to a job, part by part, and no more often than clients can use."""
        stream = None
        try:
            stream = self._backend.stream(self._name, job)
            told: set[int] = set()
            live = set(range(getattr(job.params, "n", 1)))
            sent = time.monotonic()
            async for part in stream:
                yield part
                told.add(part.index)
                if part.finish_reason is not None:
                    live.discard(part.index)
                if live and live <= told:
                    # Each answer has told something. While this sleeps the engine's own stream gathers what comes.
                    await asyncio.sleep(max(0.0, sent + self._merge - time.monotonic()))
                    told.clear()
                    sent = time.monotonic()
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

    async def metrics(self) -> list[Family]:
        """What this replica shows to Prometheus."""
        return await self._backend.metrics()

    async def ticks(self) -> Ticks | Problem:
        """What the engine has done lately."""
        return await _told(self._backend.ticks(self._name))

    async def health(self) -> str | None:
        """What is wrong with the engine; None when nothing is."""
        return (await self._backend.health())[self._name]

    async def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises.

        :raises RuntimeError: when the engine is dead, or stuck.
        """
        wrong = await self.health()
        if wrong is not None:
            raise RuntimeError(f"the engine of {self._name} is not well: {wrong}")

    async def __del__(self) -> None:
        """Called by Serve once the requests have ended, or their time is over."""
        await self._backend.aclose()


async def _told(work: Awaitable[T]) -> T | Problem:
    try:
        return await work
    except Exception as error:
        return describe(error)
