"""`impatient`: uvicorn's protocol, but nobody holds a connection for nothing."""

import asyncio
from typing import Any

from aphoton_serve.sse import LAST_WORD

__all__ = ["impatient"]

MAX_HEAD = 64 * 1024
"""Bytes of a request's head, about."""
FIELD = 64
"""Bytes that a field of a head takes in memory beside its text, and counts for."""

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """The protocol, for `uvicorn.Config`.

    uvicorn waits for ever for the rest of a request's head, however long that gets, and for a client to read its
    answer; and does not notice that a client has gone that had already sent more behind its request. A server has so
    many connections and no more, and a request that nobody waits for takes others' time.

    :param seconds: in which a head must have arrived, from the connection on or from its first byte; and in which a
        client must have read anything of what is left of its answer.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class Impatient(base):  # type: ignore[misc]
        _hurry: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _deaf = False  # closed after this answer: what came behind the request has been dropped
        _first: Any = None  # the request that is being answered, where others have come in the same packet

        # Of httptools; h11 has limits of its own.
        _heading = False
        _head = 0
        _fields = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._calm()
            if self._unread is not None:
                self._unread.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            asking = self._asking()
            if asking is not None and not asking.more_body:
                self._drop(asking)
            if self._deaf:
                return
            if self._heading:
                self._head += len(data)
            super().data_received(data)
            if self._first is not None:
                self.cycle, self._first = self._first, None
                self._drop(self.cycle)
            asking = self._asking()
            if asking is not None:
                self._calm()
                if not asking.more_body:
                    # Or a client that goes would not be noticed. What it sent behind its request has stopped that.
                    self.flow.resume_reading()
            elif self._heading and self._head > MAX_HEAD:
                self._deaf = True
                self.transport.write(TOO_LARGE)
                self.transport.close()
            else:
                self._wait()

        def _asking(self) -> Any:
            """The request that has not been answered to its end."""
            return None if self.cycle is None or self.cycle.response_complete else self.cycle

        def _drop(self, asking: Any) -> None:
            """Requests in a pipeline: HTTP lets a server answer the first and close."""
            asking.keep_alive = False
            self._deaf = True

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._heading, self._head, self._fields = True, 0, 0

        def on_header(self, name: bytes, value: bytes) -> None:
            self._fields += len(name) + len(value) + FIELD
            if self._fields > MAX_HEAD:
                raise ValueError("too many header fields")  # which ends the parsing: 400
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._heading = False
            asking = self._asking()
            super().on_headers_complete()
            if asking is not None:
                self._first = self._first or asking
                self.pipeline.clear()

        def on_response_complete(self) -> None:
            if self._deaf:
                self.transport.close()
            super().on_response_complete()
            self._watch()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def shutdown(self) -> None:
            super().shutdown()
            if self._asking() is None and self.transport.get_write_buffer_size():
                self.loop.call_later(LAST_WORD, self.transport.abort)

        def _wait(self) -> None:
            """Unless it does already: a byte now and then makes nobody's time longer."""
            if self._hurry is None:
                self._hurry = self.loop.call_later(seconds, self._hang_up)

        def _calm(self) -> None:
            if self._hurry is not None:
                self._hurry.cancel()
                self._hurry = None

        def _hang_up(self) -> None:
            self._hurry = None
            if self._asking() is None:
                self.transport.close()

        def _watch(self) -> None:
            left = self.transport.get_write_buffer_size()
            if left and self._unread is None:
                self._unread = self.loop.call_later(seconds, self._look, left)

        def _look(self, before: int) -> None:
            """A request that is being answered has a time of its own."""
            self._unread = None
            left = self.transport.get_write_buffer_size()
            if left and left >= before and (self._asking() is None or self.transport.is_closing()):
                self.transport.abort()
            else:
                self._watch()

    return Impatient
