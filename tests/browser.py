"""`Tab`: a page in a headless Chromium of this machine, driven through the DevTools protocol."""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

__all__ = ["Tab", "browsing", "find_chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root, as whom containers run, may not have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """Its path: the variable CHROMIUM, or what is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """A page.

    :ivar requests: addresses that it has asked for, in order.
    :ivar complaints: errors and warnings of its console, and exceptions of its scripts.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self) -> None:
        """Take what the browser says, until it closes."""
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        message = await answer
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def run(self, script: str) -> Any:
        """The value of a script; of a promise, what it brings."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a script is true, frame by frame."""
        await self.run(
            "new Promise(done => { const look = () => "
            f"({condition}) ? done() : requestAnimationFrame(look); look(); }})"
        )

    async def text(self, selector: str) -> str:
        """What an element shows."""
        found: str = await self.run(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    async def click(self, selector: str) -> None:
        """With the mouse, in the element's midst."""
        x, y = await self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, selector: str, text: str) -> None:
        """Put the cursor into the element, and ``text`` there."""
        await self.click(selector)
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """One key, such as Enter."""
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text if kind == "keyDown" else ""
            )


@asynccontextmanager
async def browsing(chromium: str, url: str, folder: Path) -> AsyncIterator[Tab]:
    """A page at ``url``, in a browser of its own that has its files in ``folder``."""
    process = await asyncio.create_subprocess_exec(
        chromium, *FLAGS, f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    draining: asyncio.Task[bytes] | None = None
    try:
        async for line in process.stderr:
            if line.startswith(b"DevTools listening on "):
                break
        else:
            raise RuntimeError("Chromium did not start")
        draining = asyncio.create_task(process.stderr.read())
        address = line.split()[-1].decode()
        # The browser's own socket tells its first page, and the page has another.
        async with connect(address, proxy=None, max_size=None) as socket:
            await socket.send(json.dumps({"id": 0, "method": "Target.getTargets"}))
            targets = json.loads(await socket.recv())["result"]["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            place = f"{address.partition('/devtools/')[0]}/devtools/page/{page}"
            async with connect(place, proxy=None, max_size=None) as there:
                tab = Tab(there)
                reading = asyncio.create_task(tab.read())
                for domain in ("Network", "Runtime", "Log", "Page"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=url)
                await tab.until("document.readyState === 'complete'")
                try:
                    yield tab
                finally:
                    await there.close()
                    await reading
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if draining is not None:
            await draining
