"""`CompletionStream`: a request as an async iterator of pieces."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

import anyio

from aphoton.completion import Completion, Piece
from aphoton.errors import AphotonError, EngineClosed
from aphoton.request import Request

__all__ = ["CompletionStream"]


class Abort(Protocol):
    """Ends a request, whatever its state. May be called from any thread.

    :param collected: called while garbage is collected.
    """

    def __call__(self, request: Request, *, collected: bool = False) -> None: ...


class CompletionStream:
    """The pieces of one request, as they come: ``async for piece in engine.stream(...)``.

    The request is submitted by the first step of ``async for``, by ``async with``, or by `completion`. A consumer
    slower than the model gets fewer and longer pieces; nothing queues up. The request ends, and everything that it
    held is freed, when the stream is closed, when the task that awaits it is cancelled or times out, and when the
    stream is dropped: leaving ``async for`` early over a stream that nobody else holds is enough.

    A task that is cancelled or fails in the body of its loop, while it awaits something else, drops the stream only
    when its frame goes, and a traceback may keep that. Where this can happen, a context ends the request at once::

        async with engine.stream(prompt) as stream:  # or contextlib.aclosing
            async for piece in stream:
                await send(piece.text)

    One task reads a stream; any task may close it.
    """

    def __init__(self, submit: Callable[[], Awaitable[Request]], abort: Abort) -> None:
        """Made by `aphoton.Engine`."""
        self._submit = submit
        self._abort = abort
        self._request: Request | None = None
        self._closed = False
        self._submitting: anyio.CancelScope | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """The next piece.

        :raises StopAsyncIteration: after the piece that has a ``finish_reason`` (each of ``n`` outputs has one), and
            after `aclose`.
        :raises AphotonError: what went wrong: at the first step what is wrong with the request, later `EngineDead`.
        """
        if self._closed:
            raise StopAsyncIteration
        # This runs for every piece of every stream, in the time that a tick has for its rows.
        request = self._request if self._request is not None else await self._started()
        while request is not None and not request.ended:
            waiter = request.waiter(tokens=True)
            if waiter is not None:
                try:  # as `_wait`, whose coroutine costs a twentieth of what the host has for a token
                    await waiter
                except asyncio.CancelledError:
                    self._abort(request)
                    raise
                finally:
                    request.waited()
            piece = request.take()
            if piece is not None:
                return piece
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        """Wait for the end: the whole request, with the pieces that have been taken before.

        After `aclose` it is what had come by then, with ``finish_reason`` ``"abort"``.

        :raises AphotonError: as for a piece; `EngineClosed` when the stream was closed before it was submitted.
        """
        request = await self._open()
        while (waiter := request.waiter(tokens=False)) is not None:
            await self._wait(request, waiter)
        return request.completion()

    async def aclose(self) -> None:
        """End the request, if it has not ended. Returns at once; the device may finish a step that computes it."""
        self._closed = True
        if self._submitting is not None:
            self._submitting.cancel()
        if self._request is not None:
            self._abort(self._request)

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Dropped with the request running: nobody can read it any more. Any thread may collect garbage.
        if self._request is not None and not self._request.finalized:
            self._abort(self._request, collected=True)

    async def _wait(self, request: Request, waiter: asyncio.Future[None]) -> None:
        try:
            await waiter
        except asyncio.CancelledError:
            self._abort(request)
            raise
        finally:
            request.waited()

    async def _open(self) -> Request:
        request = await self._started()
        if request is None:
            raise EngineClosed("this stream was closed before it was submitted")
        return request

    async def _started(self) -> Request | None:
        """The request, submitted once; None when the stream was closed before."""
        if self._request is None and not self._closed:
            if self._submitting is not None:
                raise AphotonError("this stream is being started by another task: one task reads a stream")
            try:
                with anyio.CancelScope() as self._submitting:
                    self._request = await self._submit()
            finally:
                self._submitting = None
            if self._closed and self._request is not None:  # it was too late to cancel
                self._abort(self._request)
        return self._request
