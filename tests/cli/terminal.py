"""A program in a terminal of its own, for what only a terminal does: Ctrl-C and Ctrl-D."""

import os
import pty
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

CTRL_C, CTRL_D = "\x03", "\x04"

START = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[0] = "aphoton"
runpy.run_module("aphoton", run_name="__main__")
"""
"""Makes the terminal the one whose Ctrl-C reaches this process, then is ``python -m aphoton``."""


class Terminal:
    """``aphoton`` with arguments, on a pseudo-terminal.

    :ivar text: all that it has written.
    """

    def __init__(self, *arguments: str, patience: float = 60.0) -> None:
        """:param patience: seconds to wait for anything: only a program that hangs takes so long."""
        self._patience = patience
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment,
        )
        os.close(slave)
        self.text = ""
        self._read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> str:
        """Wait until the program writes ``text``; what came before it, since the last call."""
        deadline = time.monotonic() + self._patience
        while (found := self.text.find(text, self._read)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text[self._read :]!r}"
            assert self._receive(), f"ended without {text!r}: {self.text[self._read :]!r}"
        before, self._read = self.text[self._read : found], found + len(text)
        return before

    def interrupt(self, text: str) -> str:
        """Type Ctrl-C until the program writes ``text``, and again after seconds, as a person would: input() can miss
        one that comes in the moment between showing its prompt and waiting for a key. Not after one second: on a busy
        machine the first one may take as long, and then there are two."""
        while True:
            self.type(CTRL_C)
            for _ in range(50):
                if text in self.text[self._read :] or not self._receive():
                    return self.expect(text)

    def end(self) -> int:
        """Wait until the program ends: its exit code."""
        while self._receive():
            pass
        return self.process.wait(self._patience)

    def _receive(self) -> bool:
        """Read what there is, waiting a little; False at the end."""
        ready, _, _ = select.select([self._master], [], [], 0.2)
        if not ready:
            return self.process.poll() is None
        try:
            received = os.read(self._master, 65536)
        except OSError:  # how Linux says that nobody has the terminal open any more
            return False
        self.text += received.decode(errors="replace")
        return bool(received)
