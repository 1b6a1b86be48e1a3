"""`impatient`: uvicorn's protocol, but nobody holds a connection for nothing."""

import asyncio
import contextlib
import fcntl
import re
import struct
import termios
from typing import Any

__all__ = ["impatient"]

MAX_HEAD = 64 * 1024
"""Bytes of a request's head, about."""
FIELD = 64
"""Bytes that a field of a head takes in memory beside its text, and counts for."""

UPGRADE, NO_UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=:)", re.IGNORECASE), b"ignored"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """The protocol, for `uvicorn.Config`.

    uvicorn waits for ever for the rest of a request's head, however long that gets, and for a client to read its
    answer; and does not notice that a client has gone that had already sent more behind its request. A server has so
    many connections and no more, and a request that nobody waits for takes others' time.

    Nothing is upgraded: a client that asks for HTTP/2, as Java's does, gets its answer in HTTP/1.1. httptools would
    take the body of its request for something else.

    :param seconds: in which a head must have arrived, from the connection on or from its first byte; and in twice which
        a client must have read anything of what is left of its answer.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class Impatient(base):  # type: ignore[misc]
        _hurry: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _deaf = False  # to the end: what came behind a request has been dropped
        _first: Any = None  # the request that is being answered, where others have come in the same packet

        # Of httptools; h11 has limits of its own, and keeps to itself what came with a request.
        _lingers = hasattr(base, "on_headers_complete")
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
            if asking is None and b"pgrade" in data:
                end = data.find(b"\r\n\r\n")
                data = UPGRADE.sub(NO_UPGRADE, data[:end], count=1) + data[end:] if end >= 0 else data
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
            self._deaf = True
            if not self._lingers:
                asking.keep_alive = False

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
            if self._unread is not None:
                self._unread.cancel()  # it was for an answer before this one
                self._unread = None
            if self._deaf and not self._lingers:
                self.transport.close()
            super().on_response_complete()
            if self._deaf and not self.transport.is_closing() and self.transport.can_write_eof():
                # What comes is read and dropped until the client is done, or uvicorn's time for the next request is
                # over: closed with something unread, a connection loses the end of the answer, too.
                self.transport.write_eof()
            self._watch()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

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

        def _watch(self, before: int = 0, still: bool = False) -> None:
            """:param still: `_unsent` has been ``before`` for that long already."""
            if self._unread is None and self.transport.get_write_buffer_size():
                self._unread = self.loop.call_later(seconds, self._look, before or self._unsent(), still)

        def _look(self, before: int, still: bool) -> None:
            self._unread = None
            left = self._unsent()
            asking = self._asking()
            # Whoever is being answered has a time of its own, but not who has asked again and read nothing.
            answered = asking is not None and asking.response_started and not self.transport.is_closing()
            if left != before or answered:
                self._watch()
            elif still:
                self.transport.abort()
            else:
                self._watch(before, still=True)

        def _unsent(self) -> int:
            """Bytes that the client has not taken: the transport's alone stand still for as long as the system's own
            buffer is full, megabytes of it."""
            with contextlib.suppress(OSError):
                queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
                return int(self.transport.get_write_buffer_size() + struct.unpack("i", queued)[0])
            return int(self.transport.get_write_buffer_size())

    return Impatient
