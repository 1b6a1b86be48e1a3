"""`impatient`: uvicorn's protocol, but it hangs up on whoever connects and does not say what they want."""

import asyncio
from typing import Any

__all__ = ["impatient"]


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """The protocol, for `uvicorn.Config`.

    uvicorn waits for the rest of a request's head for ever, and a server has so many connections and no more.

    :param seconds: in which a head must have arrived, from the connection on or from its first byte.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class Impatient(base):  # type: ignore[misc]
        _hurry: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            else:
                self._calm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._calm()
            super().connection_lost(exc)

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
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Impatient
