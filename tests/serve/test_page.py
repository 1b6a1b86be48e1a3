"""The page at ``/``, in a real browser."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from browser import Tab, browsing, find_chromium
from engine.waiting import idle, until
from sayer import saying
from serving import Served, serving

from aphoton.device.sim import SimCosts
from aphoton_serve.keys import KeyRing
from aphoton_serve.local import LocalBackend

pytestmark = pytest.mark.browser

KEY = "sk-very-secret"
MARKUP = '<img src=x onerror="document.title=1"><b>bold</b> &amp; <script>document.title = 2</script>'
COLORS = """(() => {
  const canvas = document.getElementById("ticks"), style = getComputedStyle(document.documentElement);
  if (!canvas.width || !canvas.height) return [];
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] === 255) seen.add("#" + [0, 1, 2].map(j => data[i + j].toString(16).padStart(2, "0")).join(""));
  return ["host", "busy", "idle"].filter(name => seen.has(style.getPropertyValue("--" + name).trim()));
})()"""
"""Which of the timeline's colors its canvas shows."""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = find_chromium()
    if found is None:
        pytest.skip("there is no Chromium")
    return found


@pytest.fixture
async def served(sims: None) -> AsyncIterator[Served]:
    endless = saying("la ", end=False, max_model_len=1_000_000)
    models = {
        "hello": saying("Hello, wörld!"),
        # Its forward is shorter than what the host does: the device waits.
        "endless": msgspec.structs.replace(endless, costs=SimCosts(forward=0.2e-3)),
        "markup": saying(MARKUP),
    }
    async with serving(LocalBackend(models, max_rows=4, kv_pages=100_000)) as served:
        yield served


@pytest.fixture
async def tab(chromium: str, served: Served, tmp_path: Path) -> AsyncIterator[Tab]:
    """The page, which must have complained of nothing and asked nobody else."""
    url = f"http://127.0.0.1:{served.port}/"
    async with browsing(chromium, url, tmp_path / "profile") as tab:
        await tab.until("model.options.length > 0")
        yield tab
        assert tab.requests[0] == url
        assert [one for one in tab.requests if not one.startswith((url, "data:,"))] == []
        assert tab.complaints == []


async def ask(tab: Tab, model: str, text: str) -> None:
    await tab.run(f"model.value = '{model}'")
    await tab.type("#text", text)
    await tab.press("Enter")


async def test_it_lists_the_models(tab: Tab) -> None:
    assert await tab.run("[...model.options].map(option => option.value)") == ["hello", "endless", "markup"]


async def test_a_conversation(tab: Tab, served: Served) -> None:
    await ask(tab, "hello", "Good day")
    await tab.until("document.querySelector('.turn.model')?.textContent === 'Hello, wörld!' && $('stop').disabled")
    assert await tab.text(".turn.user") == "Good day"
    await tab.type("#text", "And again")
    await tab.click("#send")
    await tab.until("document.querySelectorAll('.turn.model').length === 2 && $('stop').disabled")
    assert await tab.run("messages.map(message => message.role)") == ["user", "assistant"] * 2
    await tab.click("#clear")
    assert await tab.text("#talk") == "" and await tab.run("messages.length") == 0
    await idle(served.engine("hello"))


async def test_stop_ends_the_request(tab: Tab, served: Served) -> None:
    """While it streams: its text grows, the rate is told, and the timeline is drawn with its gaps."""
    engine = served.engine("endless")
    await ask(tab, "endless", "Sing")
    await tab.until("document.querySelector('.turn.model')?.textContent.startsWith('la la ')")
    said = len(await tab.text(".turn.model"))
    await tab.until(f"document.querySelector('.turn.model').textContent.length > {said}")
    assert engine.stats().running == 1 and not await tab.run("$('stop').disabled")
    await tab.until("parseInt(rate.textContent) > 0")
    await tab.until(f"{COLORS}.join() === 'host,busy,idle'")
    assert "%" in await tab.text("#idle")
    await tab.click("#stop")
    await tab.until("$('stop').disabled && !$('send').disabled")
    await until(lambda: not engine.stats().running)
    await idle(engine)
    await tab.until("rate.textContent === '0 tok/s'")


async def test_a_new_chat_during_an_answer_is_empty(tab: Tab, served: Served) -> None:
    await ask(tab, "endless", "Sing")
    await tab.until("document.querySelector('.turn.model')?.textContent.startsWith('la la ')")
    await tab.click("#clear")
    await tab.until("$('stop').disabled && !$('send').disabled")
    assert await tab.run("messages.length") == 0
    await until(lambda: not served.engine("endless").stats().running)


async def test_an_answer_is_text(tab: Tab) -> None:
    await ask(tab, "markup", "<i>Hi</i>")
    await tab.until("document.querySelector('.turn.model')?.textContent && $('stop').disabled")
    assert await tab.text(".turn.model") == MARKUP and await tab.text(".turn.user") == "<i>Hi</i>"
    assert await tab.run("talk.querySelectorAll(':not(p)').length") == 0
    assert await tab.run("document.title") == "aphoton"


async def test_it_asks_for_a_key(chromium: str, sims: None, tmp_path: Path) -> None:
    backend = LocalBackend({"hello": saying("Hello, wörld!")}, kv_pages=10_000)
    async with serving(backend, keys=KeyRing([KEY])) as served:
        url = f"http://127.0.0.1:{served.port}/"
        async with browsing(chromium, url, tmp_path / "profile") as tab:
            await tab.until("document.querySelector('.turn.wrong')")
            assert "You didn't provide an API key" in await tab.text(".turn.wrong")
            assert await tab.run("document.activeElement.id") == "key" and await tab.run("model.options.length") == 0
            await tab.call("Input.insertText", text="wrong-secret")
            await tab.press("Enter")
            await tab.until("talk.textContent.includes('Incorrect API key provided')")
            refused = len(tab.complaints)
            await tab.run("key.value = ''")
            await tab.type("#key", KEY)
            await tab.press("Enter")
            await tab.until("model.options.length === 1")
            await ask(tab, "hello", "Hi")
            await tab.until(
                "document.querySelector('.turn.model')?.textContent === 'Hello, wörld!' && $('stop').disabled"
            )
            assert all(one.startswith(url) or one == "data:," for one in tab.requests)
            assert not any(KEY in one for one in tab.requests)
            # A browser's console tells of each refusal, and of nothing else.
            assert refused == 2 and all(f"401 (Unauthorized) {url}v1/models" in one for one in tab.complaints)
            assert len(tab.complaints) == refused
