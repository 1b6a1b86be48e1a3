"""A command as a program of its own."""

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from subprocess import PIPE, STDOUT

from anyio import open_process
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

__all__ = ["Program", "program"]


class Program:
    """The program, and what it has written."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self.process = process
        self.text = ""
        self._output = TextReceiveStream(process.stdout)

    async def expect(self, pattern: re.Pattern[str]) -> str:
        """Wait until it has written that; the first group of it."""
        while (found := pattern.search(self.text)) is None:
            self.text += await self._output.receive()
        return found[1]

    async def end(self) -> int:
        """Wait until it has ended; its exit status."""
        async for text in self._output:
            self.text += text
        return await self.process.wait()


@asynccontextmanager
async def program(*command: str, **environment: str) -> AsyncIterator[Program]:
    """It is killed when the context is left, if it still runs."""
    env = {**os.environ, **environment}
    async with await open_process(command, stdout=PIPE, stderr=STDOUT, env=env) as process:
        try:
            yield Program(process)
        finally:
            if process.returncode is None:
                process.kill()
