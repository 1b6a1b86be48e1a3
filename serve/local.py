"""`LocalBackend`: engines in this process."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Self

from aphoton import (
    AphotonError,
    Completion,
    CompletionStream,
    Engine,
    InvalidRequest,
    Piece,
    SimModel,
    TokenLogprob,
)
from aphoton.config import EngineConfig
from aphoton.progress import Progress
from aphoton_serve.backend import Answer, Choice, Family, Job, ModelCard, Part, PartStream, Score, Ticks, unknown_model
from aphoton_serve.hermes import with_tools
from aphoton_serve.metrics import EngineMetrics
from aphoton_serve.tracing import RequestSpan

__all__ = ["LocalBackend", "LocalStream"]

SPANS = 600
"""The newest, that `LocalBackend.ticks` tells: some hundred steps."""


class LocalBackend:
    """Engines in this process, on the event loop that starts them.

    ::

        async with LocalBackend({"smollm2": "smollm2"}) as backend:
            ...
    """

    def __init__(
        self,
        models: Mapping[str, str | os.PathLike[str] | SimModel],
        config: EngineConfig | None = None,
        *,
        tick_timeout: float = 60.0,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        """Nothing is loaded yet; `start` does that.

        :param models: what `Engine` takes, by the name under which it is offered.
        :param config: of each engine; ``settings`` go before those in it. Unless told otherwise an engine whose queue
            is full raises, so that a client hears of it.
        :param tick_timeout: seconds after which an engine that has something to do and finishes no step is unhealthy.
        :param progress: called while models are fetched.
        """
        if config is None:
            settings = {"overload": "raise", **settings}
        self._engines = {name: Engine(model, config, progress=progress, **settings) for name, model in models.items()}
        self._tick_timeout = tick_timeout
        self._metrics = EngineMetrics()
        self._cards: dict[str, ModelCard] = {}

    async def start(self) -> Self:
        """Load the models, one after the other, and begin to serve.

        :raises ModelError: as `Engine.start`; what had been started is closed again.
        """
        try:
            for name, engine in self._engines.items():
                await engine.start()
                self._metrics.add(name, engine)
                self._cards[name] = ModelCard(
                    id=name,
                    created=int(time.time()),
                    max_model_len=engine.limits.max_model_len,
                    can_chat=engine.can_chat,
                )
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self, *, drain: bool | float = False) -> None:
        """Close the engines; ``drain`` as in `Engine.aclose`, all of them at the same time."""
        await asyncio.gather(*(engine.aclose(drain=drain) for engine in self._engines.values()))

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def engine(self, model: str) -> Engine:
        """:raises ApiError: 404, when there is none of that name."""
        try:
            return self._engines[model]
        except KeyError:
            raise unknown_model(model) from None

    @property
    def names(self) -> list[str]:
        return list(self._cards)

    async def card(self, model: str) -> ModelCard:
        try:
            return self._cards[model]
        except KeyError:
            raise unknown_model(model) from None

    def stream(self, model: str, job: Job) -> PartStream:
        return LocalStream(model, self.engine(model), job, self._metrics)

    async def complete(self, model: str, job: Job) -> Answer:
        return await LocalStream(model, self.engine(model), job, self._metrics).answer()

    async def tokenize(self, model: str, text: str) -> list[int]:
        return await self.engine(model).tokenize(text)

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        return await self.engine(model).detokenize(ids)

    async def health(self) -> dict[str, str | None]:
        return {name: self._ailment(engine) for name, engine in self._engines.items()}

    async def metrics(self) -> list[Family]:
        return self._metrics.families()

    async def ticks(self, model: str) -> Ticks:
        engine = self.engine(model)
        spans = engine.timeline.spans
        return Ticks(spans=list(islice(spans, max(0, len(spans) - SPANS), None)), tokens=engine.stats().tokens)

    def _ailment(self, engine: Engine) -> str | None:
        """What is wrong with an engine; None when nothing is."""
        try:
            stats = engine.stats()
        except AphotonError as error:  # closed, or dead
            return type(error).__name__
        if stats.stalled <= self._tick_timeout:
            return None
        return (
            f"no step has finished for {stats.stalled:.1f} s, with {stats.running} running and {stats.waiting} waiting"
        )


class LocalStream:
    """A request to an engine, as parts, and noted in the metrics when it ends, however it does."""

    def __init__(self, model: str, engine: Engine, job: Job, metrics: EngineMetrics) -> None:
        """:raises InvalidRequest: for parameters that cannot be."""
        self._model = model
        self._engine = engine
        self._metrics = metrics
        self._noted = False
        self._over = False
        self._span = RequestSpan(model, job)
        try:
            self._stream = _open(engine, job)
        except AphotonError as error:
            self._span.failed(type(error).__name__)
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        if self._over:
            raise StopAsyncIteration
        try:
            return self._part(await anext(self._stream))
        except StopAsyncIteration:
            if self._noted:  # closed
                raise
        except BaseException as error:
            self._failed(error)
            raise
        self._over = True
        done = await self._stream.completion()  # all of it is there
        self._note(done)
        return Part(usage=done.usage)

    async def answer(self) -> Answer:
        """The whole answer, when it has ended."""
        try:
            done = await self._stream.completion()
        except BaseException as error:
            self._failed(error)
            raise
        self._note(done)
        return Answer(
            choices=tuple(
                Choice(
                    index=output.index,
                    text=output.text,
                    finish_reason=output.finish_reason,
                    scores=self._scores(output.token_ids, output.logprobs),
                )
                for output in done.outputs
            ),
            usage=done.usage,
        )

    async def aclose(self) -> None:
        await self._stream.aclose()
        if self._noted:
            return
        self._over = True
        try:
            self._note(await self._stream.completion())  # what had come by now
        except AphotonError as error:  # it had not been submitted, or had failed
            self._failed(error)

    def _part(self, piece: Piece) -> Part:
        return Part(
            index=piece.index,
            text=piece.text,
            finish_reason=piece.finish_reason,
            scores=self._scores(piece.token_ids, piece.logprobs),
        )

    def _scores(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None
    ) -> tuple[Score, ...] | None:
        if logprobs is None:
            return None
        ids = list(tokens)
        for entry in logprobs:
            ids += [other for other, _ in entry.top] if entry is not None else ()
        names = dict(zip(ids, self._engine.token_bytes(ids), strict=True))
        return tuple(
            Score(names[token], None)
            if entry is None  # a prompt's first token
            else Score(names[token], entry.logprob, tuple((names[other], value) for other, value in entry.top))
            for token, entry in zip(tokens, logprobs, strict=True)
        )

    def _note(self, done: Completion) -> None:
        self._noted = True
        outcome = "abort" if any(o.finish_reason == "abort" for o in done.outputs) else done.finish_reason
        self._metrics.ended(self._model, outcome, done.timings, done.usage)
        self._span.ended(done)

    def _failed(self, error: BaseException) -> None:
        if not self._noted:
            self._noted = True
            outcome = "abort" if isinstance(error, asyncio.CancelledError) else type(error).__name__
            self._metrics.ended(self._model, outcome)
            self._span.failed(outcome)


def _open(engine: Engine, job: Job) -> CompletionStream:
    if job.messages is None:
        if job.prompt is None:
            raise InvalidRequest("prompt", "is missing")
        return engine.stream(job.prompt, job.params)
    messages, tools = with_tools(job.messages, job.tools, template_takes_them=engine.takes_tools)
    return engine.chat_stream(messages, job.params, tools=tools)
