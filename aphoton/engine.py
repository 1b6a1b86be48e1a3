"""`Engine`: what an app calls, its start and its end."""

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Many
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec

from aphoton.checks import build, check_float
from aphoton.choice import Choice
from aphoton.completion import Completion, FinishReason
from aphoton.config import EngineConfig
from aphoton.constraints import Constraints
from aphoton.device.base import Limits
from aphoton.device.sim import SimModel
from aphoton.door import Door
from aphoton.encoding import Ids, Prompt, check_ids, encode_chat, encode_prompt, encode_text
from aphoton.errors import AphotonError, DeadlineExceeded, EngineClosed, EngineDead, InvalidRequest
from aphoton.loader import Loaded, is_virtual, load
from aphoton.observe import Stats, Timeline
from aphoton.offloop import off_loop
from aphoton.progress import Progress
from aphoton.request import Request
from aphoton.sampling import SamplingParams
from aphoton.scheduler import Pipeline, Scheduler, Sequence
from aphoton.stream import CompletionStream
from aphoton.submission import make_sequences
from aphoton.text import StopStrings
from aphoton.tracebacks import clear_traceback
from aphoton.turnstile import Turnstile

__all__ = ["Engine", "Prompt"]

SUBMISSIONS = 8
"""That are made in a turn of the loop: each takes some 50 us, and a hundred may come at once."""
CONSUMERS = 32
"""That are woken for a turn of the loop: each takes some 7 us for its piece, and a step has tokens for all of them."""

Encode = Callable[[Loaded], Awaitable[Ids]]
"""A request's prompt as token ids, in the terms of what is loaded."""


class Engine:
    """A model, and the loop that runs it, inside an asyncio program.

    ::

        async with aphoton.Engine("smollm2") as engine:
            done = await engine.generate("Once upon a time", max_tokens=64)

    One object, no subprocess and no global state: several engines live in one process. An engine belongs to the event
    loop on which it was started, and is started once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | SimModel,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        """Nothing is loaded yet; `start` does that.

        :param model: ``"smollm2"``, a hub id, a folder (safetensors), a ``.gguf`` file, ``"random:tiny"`` and other
            random shapes, or a `SimModel`.
        :param config: settings; or give them as keyword arguments, which go before those in ``config``.
        :param progress: called while a model is fetched; see `Progress`.
        :raises InvalidRequest: for a setting that does not exist or cannot be.
        """
        if not isinstance(model, str | os.PathLike | SimModel):
            raise InvalidRequest("model", f"must be a name, a path or a SimModel, not {model!r}")
        self.config = _merge(EngineConfig, config, settings)
        self._model = model
        self._progress = progress
        self._state: Literal["new", "starting", "running", "closing", "closed", "dead"] = "new"
        self._fault: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[Loaded] | None = None
        self._loaded: Loaded | None = None
        self._scheduler: Scheduler | None = None
        self._pipeline: Pipeline | None = None
        self._door: Door | None = None
        # In virtual time it must not matter how fast this machine is.
        virtual = is_virtual(model, self.config)
        self._turnstile = Turnstile(SUBMISSIONS, steady=virtual)
        self._entering = 0  # requests that have been made and are not at the door yet, or stand there
        self._entered: asyncio.Event | None = None  # of a drain: nobody is entering any more
        self._consumers = Turnstile(CONSUMERS, steady=virtual)
        self._seeds = random.Random(self.config.seed)
        self.timeline = Timeline()

    # Life and death

    async def start(self) -> Self:
        """Load the model, off the loop, and begin to serve.

        :raises ModelError: when the model cannot be found, read or run.
        :raises EngineClosed: when the engine has been started before.
        """
        if self._state != "new":
            state = "closed" if self._state == "closed" else "started once"
            raise EngineClosed(f"an engine that is {state} is not started again: make another one")
        self._state = "starting"
        self._loop = asyncio.get_running_loop()
        loading = self._loading = self._loop.create_task(
            anyio.to_thread.run_sync(
                partial(load, self._model, self.config, self._progress, lambda: self._state != "starting"),
                limiter=anyio.CapacityLimiter(1),  # of its own: the app's threads may all wait for the engine
            )
        )
        loading.add_done_callback(self._end_loading)
        try:
            loaded = await asyncio.shield(loading)
        except BaseException:
            self._state = "closed"
            # The thread sees that and ends; until then it holds memory that a next engine may need.
            with anyio.CancelScope(shield=True):
                await asyncio.wait([loading])
            if not loading.cancelled() and loading.exception() is None:
                loading.result().device.stop()
            raise
        if self._state != "starting":
            loaded.device.stop()
            raise EngineClosed("the engine was closed while it started")
        try:
            self._assemble(loaded)
        except BaseException:
            self._state = "closed"
            loaded.device.stop()
            raise
        ready: asyncio.Future[None] = self._loop.create_future()
        self._task = self._loop.create_task(self._serve(ready), name="aphoton engine")
        try:
            await ready
        except BaseException:
            await self.aclose()
            raise
        self._running()  # it may have been closed meanwhile
        return self

    def _end_loading(self, loading: asyncio.Task[Loaded]) -> None:
        self._loading = None  # it keeps the model
        # The exception is seen by that: whoever has given the start up does not hear of it.
        if not loading.cancelled() and (fault := loading.exception()) is not None:
            clear_traceback(fault)  # it has what was loaded by then

    def _assemble(self, loaded: Loaded) -> None:
        """All that stands between requests and the device."""
        config = self.config
        scheduler = Scheduler(
            loaded.device.limits,
            max_rows=config.max_rows,
            page_size=config.page_size,
            max_step_tokens=config.max_step_tokens,
            now=loaded.device.now,
            check=os.environ.get("APHOTON_DEBUG", "0") not in ("", "0"),
        )
        pipeline = Pipeline(scheduler, loaded.device, depth=config.pipeline_depth, timeline=self.timeline)
        door = Door(scheduler, max_waiting=config.max_waiting, overload=config.overload, wake=self._wake)
        self._loaded, self._scheduler, self._pipeline, self._door = loaded, scheduler, pipeline, door

    async def aclose(self, *, drain: bool | float = False) -> None:
        """Stop serving and free everything. Calling it again does nothing, but cuts short what an earlier call drains.

        :param drain: what happens to requests that run or wait. False: they end with `EngineClosed`. True: they run to
            their end first. A number: they get so many seconds. New ones are refused meanwhile.
        :raises InvalidRequest: for a ``drain`` that cannot be; nothing is closed then.
        """
        if type(drain) is not bool:
            check_float("drain", drain, 0.0, 1e9)
        if self._state in ("new", "starting"):
            self._state = "closed"
        if self._loading is not None and not self._loading.done():
            self._own_loop()
            await asyncio.wait([self._loading])
        if self._task is None or self._task.done():
            return
        self._own_loop()
        if self._state in ("running", "closing"):
            self._state = "closing"
            if drain:
                await self._drained(None if drain is True else float(drain))
            self._entered = None
            self._end_all(lambda: EngineClosed("the engine was closed"))
        if self._pipeline is not None:
            self._pipeline.close()
        # Shielded: a device that is freed while its thread still works takes the program with it.
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # Requests

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any) -> Completion:
        """Run a prompt to its end.

        :param prompt: text, or token ids.
        :param sampling: fields of `SamplingParams`; they go before those in ``params``.
        :raises InvalidRequest: a parameter that does not exist or cannot be; its ``field`` names it.
        :raises PromptTooLong: the prompt can never fit.
        :raises EngineOverloaded: the queue is full and the engine raises then.
        :raises DeadlineExceeded: it has not ended within its ``deadline``.
        :raises EngineClosed: the engine is not running.
        :raises EngineDead: a device fault ended the engine.
        """
        return await self.stream(prompt, params, **sampling).completion()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any) -> CompletionStream:
        """The same as `generate`, piece by piece. Parameters are checked here, the prompt when it is submitted.

        Where the body of the loop over it may be cancelled or fail, put ``async with`` (or `contextlib.aclosing`)
        around the loop, so that the request ends at once: see `CompletionStream`.
        """
        return self._stream(
            lambda loaded: encode_prompt(prompt, loaded.tokenizer, loaded.device.limits.vocab_size),
            params,
            sampling,
            continues=True,
            text=prompt if isinstance(prompt, str) else None,
        )

    async def chat(
        self,
        messages: Many[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Many[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Completion:
        """Answer a conversation, through the model's own chat template.

        :param messages: each with a ``role`` and a ``content``.
        :param tools: functions that the model may call, as its template wants them; see `takes_tools`.
        :raises InvalidRequest: messages that the template does not take, or a model without one.
        """
        return await self.chat_stream(messages, params, tools=tools, **sampling).completion()

    def chat_stream(
        self,
        messages: Many[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Many[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> CompletionStream:
        """The same as `chat`, piece by piece."""
        return self._stream(
            lambda loaded: encode_chat(messages, loaded.tokenizer, loaded.chat_template, tools),
            params,
            sampling,
            continues=False,
        )

    async def tokenize(self, text: str) -> list[int]:
        """The token ids of ``text`` as a prompt, special tokens included."""
        return await encode_text("text", text, self._running().tokenizer)

    async def detokenize(self, ids: Many[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        loaded = self._running()
        tokenizer, checked = loaded.tokenizer, check_ids("ids", ids, loaded.device.limits.vocab_size)
        return await off_loop(len(checked), lambda: tokenizer.decode(checked.tolist()))

    def token_bytes(self, ids: Many[int]) -> list[bytes]:
        """What each of ``ids`` adds to a text; a special token's own name for a special token. One token may be a part
        of a character."""
        loaded = self._alive()
        checked = check_ids("ids", ids, loaded.device.limits.vocab_size)
        return [loaded.tokenizer.token_bytes(token) for token in checked.tolist()]

    def stats(self) -> Stats:
        """A snapshot of the engine."""
        self._alive()
        scheduler, pipeline, door, totals = self._scheduler, self._pipeline, self._door, self.timeline.totals
        assert scheduler is not None and pipeline is not None and door is not None
        return Stats(
            running=scheduler.running,
            waiting=len(scheduler.waiting) + len(door) + len(self._turnstile),
            pages_free=scheduler.pool.free,
            pages_cached=scheduler.cache.idle,
            pages_used=scheduler.pool.used - scheduler.cache.idle,
            zombies=scheduler.zombies,
            zombies_total=scheduler.zombies_total,
            preemptions=scheduler.preemptions,
            steps=pipeline.steps,
            stalled=pipeline.stalled,
            tokens=scheduler.tokens,
            launch_time=totals["launch"],
            wait_time=totals["wait"],
            commit_time=totals["commit"],
            sample_time=totals["sample"],
            device_busy=totals["device"],
            device_idle=self.timeline.device_idle,
        )

    @property
    def limits(self) -> Limits:
        """What the loaded model and its device allow: vocabulary, longest sequence, pages, end tokens."""
        return self._alive().device.limits

    @property
    def can_chat(self) -> bool:
        """Whether the loaded model has a chat template."""
        return self._alive().chat_template is not None

    @property
    def takes_tools(self) -> bool:
        """Whether the loaded model's chat template tells the model of ``tools``."""
        template = self._alive().chat_template
        return template is not None and template.takes_tools

    # Submission

    def _stream(
        self,
        encode: Encode,
        params: SamplingParams | None,
        sampling: dict[str, Any],
        *,
        continues: bool,
        text: str | None = None,
    ) -> CompletionStream:
        checked = _merge(SamplingParams, params, sampling)
        return CompletionStream(lambda: self._submit(encode, checked, continues, text), self._abort)

    async def _submit(self, encode: Encode, params: SamplingParams, continues: bool, text: str | None) -> Request:
        if params.deadline is None:
            return await self._admit(encode, params, continues, text)
        self._running()
        assert self._loop is not None
        until = self._loop.time() + params.deadline
        request: Request | None = None
        with anyio.CancelScope(deadline=until):
            request = await self._admit(encode, params, continues, text)
        if request is None:
            raise DeadlineExceeded(f"the request was not admitted within its deadline of {params.deadline:g} seconds")
        request.expire_at(until)
        return request

    async def _admit(self, encode: Encode, params: SamplingParams, continues: bool, text: str | None) -> Request:
        loaded = self._running()
        self._entering += 1
        try:
            return await self._enter(loaded, encode, params, continues, text)
        finally:
            self._entering -= 1
            if not self._entering and self._entered is not None:
                self._entered.set()

    async def _enter(
        self, loaded: Loaded, encode: Encode, params: SamplingParams, continues: bool, text: str | None
    ) -> Request:
        begin = loaded.device.now()
        await self._turnstile.enter()
        prompt = await encode(loaded)
        constraints: Constraints | None = None
        if params.has_rules:
            vocab_size = loaded.device.limits.vocab_size
            constraints = await Constraints.of(params, loaded.tokenizer, vocab_size, loaded.grammars)
        if params.echo and text is None:
            ids, tokenizer = prompt.tolist(), loaded.tokenizer
            text = await off_loop(len(ids), lambda: tokenizer.decode(ids))
        stops: StopStrings | None = None
        if strings := params.stop_strings:
            include = params.include_stop_str_in_output
            stops = await off_loop(sum(map(len, strings)), lambda: StopStrings(strings, include=include))
        drains = self._state == "closing" and self._entered is not None
        if not drains:  # a drain waits for this one, who asked before it
            self._running()  # it may have been closed meanwhile
        assert self._scheduler is not None and self._door is not None
        use = params.use_prefix_cache
        sequences = make_sequences(
            prompt,
            params,
            loaded.device.limits,
            self._scheduler,
            draw_seed=lambda: self._seeds.getrandbits(64),
            submitted_at=begin,
            shared=self.config.prefix_cache if use is None else use,
            constraints=constraints,
        )
        grammar = None if constraints is None else constraints.grammar
        echo = text if params.echo else None
        choices = [
            Choice(
                index,
                sequence,
                params,
                loaded.tokenizer,
                continues=continues,
                stops=stops,
                echo=echo,
                grammar=grammar,
                scored=sequences[0],
            )
            for index, sequence in enumerate(sequences)
        ]
        request = Request(choices, self._end, self._consumers, deadline=params.deadline)
        await self._door.enter(*sequences)
        return request

    def _wake(self) -> None:
        assert self._pipeline is not None
        self._pipeline.wake()

    def _abort(self, request: Request, *, collected: bool = False) -> None:
        """End a request, from any thread.

        :param collected: its stream was garbage, which is found in the midst of anything, of a tick too: the loop ends
            the request in a turn of its own.
        """
        try:
            here = not collected and asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._abort_here(request)
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
                self._loop.call_soon_threadsafe(self._abort_here, request)

    def _abort_here(self, request: Request) -> None:
        for choice in request.choices:
            if not choice.sequence.finalized:
                self._finish(choice.sequence, "abort")

    def _end(self, sequence: Sequence, error: Exception) -> None:
        self._finish(sequence, None, error=error)

    def _finish(self, sequence: Sequence, reason: FinishReason | None, *, error: Exception | None = None) -> None:
        # Without a door there is no engine any more, and nobody whose end is not out.
        assert self._door is not None
        self._door.finish(sequence, reason, error=error)

    # The loop

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """The engine's one task: the device's thread beside it, and tick after tick until closed."""
        assert self._loaded is not None and self._pipeline is not None
        device = self._loaded.device
        try:
            async with anyio.create_task_group() as group:
                try:
                    await group.start(device.serve)
                    if self._state == "starting" and not ready.done():  # nobody has closed or cancelled it meanwhile
                        self._state = "running"
                        ready.set_result(None)
                        await self._pipeline.run()
                except Exception as error:
                    self._die(error)
                finally:
                    device.stop()
        except Exception as error:  # of the device's own task
            self._die(error)
        finally:
            if self._state != "dead":
                self._state = "closed"
            self._end_all(self._gone)
            if not ready.done():
                ready.set_exception(self._gone())
            # What is left of the engine holds no model: a second one fits in what this one used.
            self._loaded = None
            self._pipeline = self._door = None

    def _die(self, fault: BaseException) -> None:
        if self._state == "dead":
            return
        self._state = "dead"
        self._fault = fault
        clear_traceback(fault)
        self._end_all(self._gone)

    def _gone(self) -> EngineDead | EngineClosed:
        """Why there is no engine any more: a new error for each who asks."""
        if self._fault is None:
            return EngineClosed("the engine was closed")
        error = EngineDead(f"the engine has died: {type(self._fault).__name__}: {self._fault}")
        error.__cause__ = self._fault
        return error

    def _end_all(self, error: Callable[[], Exception]) -> None:
        """End who is at the door, waits or runs, each with an ``error`` of its own."""
        if self._door is not None:
            self._door.close(error)
        if self._scheduler is not None:
            self._scheduler.ends.fail_all(error)

    async def _drained(self, seconds: float | None) -> None:
        """Wait until those who had asked before have all ended, or the time is over, or somebody else closes."""
        assert self._loop is not None and self._task is not None and self._pipeline is not None
        until = None if seconds is None else self._loop.time() + seconds
        if self._entered is None:
            self._entered = asyncio.Event()
        if self._entering:
            entered = self._loop.create_task(self._entered.wait())
            try:
                # The engine may die meanwhile.
                await asyncio.wait([entered, self._task], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                entered.cancel()
        if self._pipeline is not None:
            self._pipeline.close()  # returns when nobody waits or runs
        await asyncio.wait([self._task], timeout=None if until is None else max(0.0, until - self._loop.time()))

    def _running(self) -> Loaded:
        """What is loaded, for a new request.

        :raises EngineDead: after a device fault.
        :raises EngineClosed: when the engine is not running.
        :raises AphotonError: on another event loop than the engine's.
        """
        loaded = self._alive()
        if self._state != "running":
            raise EngineClosed(f"the engine is {self._state}")
        self._own_loop()
        return loaded

    def _alive(self) -> Loaded:
        """What is loaded, as long as it is: from any thread."""
        if self._state == "dead":
            raise self._gone()
        if self._state == "new":
            raise EngineClosed(
                "the engine has not been started: use `async with Engine(...)` or `await engine.start()`"
            )
        if self._loaded is None:
            raise EngineClosed(f"the engine is {self._state}")
        return self._loaded

    def _own_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise AphotonError("this engine runs on another event loop: an engine belongs to the loop that started it")


S = TypeVar("S", bound=msgspec.Struct)


def _merge(kind: type[S], given: S | None, fields: dict[str, Any]) -> S:
    """``given`` with ``fields`` on top."""
    if given is None:
        return build(kind, fields)
    if not isinstance(given, kind):
        raise InvalidRequest("params" if kind is SamplingParams else "config", f"must be a {kind.__name__}")
    return build(kind, {**msgspec.structs.asdict(given), **fields}) if fields else given
