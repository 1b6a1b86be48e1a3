"""A client that can vanish."""

import asyncio
import json
import socket
from typing import Any

__all__ = ["HEAD", "RawClient"]

HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"


class RawClient:
    """A raw connection: closing it is all that the server sees of the client's end."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, body: dict[str, Any], *, unsent: int = 0, more: bytes = b"") -> "RawClient":
        """Send a chat request, but for its last ``unsent`` bytes, or with ``more`` in the same packet."""
        # Closed behind the answer, so that who reads on finds its end.
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data[: len(data) - unsent] + more)
        await self.writer.drain()
        return self

    def vanish(self) -> None:
        """As a process that is killed: with a reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.close()
