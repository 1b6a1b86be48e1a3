"""What takes long happens off the loop.

Each test blocks the slow part until the loop lets it go on: were it done on the loop, neither could go on.
"""

import asyncio
import threading
from functools import partial
from typing import Any

import anyio.from_thread
import anyio.to_thread
import pytest
from engine.machines import Counting, Gate, machine
from engine.waiting import until

import aphoton.engine
from aphoton import Completion, Engine, SimModel
from aphoton.loader import Loaded, load
from aphoton.text import ChatTemplate


async def tokens_meanwhile(engine: Engine) -> None:
    """Somebody else's request runs to its end."""
    assert len((await engine.generate([1], max_tokens=20)).token_ids) == 20


async def test_tokenizing_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("generate", "stream", "tokenize"):
        gate = Gate()
        async with machine(monkeypatch, Counting(), tokenizer=gate) as engine:
            text = "word " * 10_000
            calls: dict[str, Any] = {
                "generate": lambda engine=engine, text=text: engine.generate(text, max_tokens=1),
                "stream": lambda engine=engine, text=text: anext(engine.stream(text, max_tokens=1)),
                "tokenize": lambda engine=engine, text=text: engine.tokenize(text),
            }
            task = asyncio.ensure_future(calls[call]())
            await until(gate.entered.is_set)
            await tokens_meanwhile(engine)
            assert not task.done()
            gate.go.set()
            await task


async def test_detokenizing_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    go, entered = threading.Event(), threading.Event()
    decode = gate.decode

    def slow(*args: Any) -> str:
        entered.set()
        assert go.wait(60), "the loop was blocked"
        return decode(*args)

    monkeypatch.setattr(gate, "decode", slow)
    async with machine(monkeypatch, Counting(), tokenizer=gate) as engine:
        task = asyncio.create_task(engine.detokenize([65] * 10_000))
        await until(entered.is_set)
        await tokens_meanwhile(engine)
        go.set()
        assert await task == "A" * 10_000


async def test_loading_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    go, entered = threading.Event(), threading.Event()

    def slow(*args: Any) -> Loaded:
        entered.set()
        assert go.wait(60), "the loop was blocked"
        return load(*args)

    async with Engine(SimModel(eos_token_ids=())) as other:
        monkeypatch.setattr(aphoton.engine, "load", slow)
        engine = Engine(SimModel())
        task = asyncio.create_task(engine.start())
        await until(entered.is_set)
        await tokens_meanwhile(other)
        assert not task.done()
        go.set()
        await task
        await engine.aclose()


async def test_rendering_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short conversations too: a template is a program of the model's maker."""
    go, entered = threading.Event(), threading.Event()
    render = ChatTemplate.render

    def slow(self: ChatTemplate, *given: Any, **options: Any) -> str:
        entered.set()
        assert go.wait(60), "the loop was blocked"
        return render(self, *given, **options)

    monkeypatch.setattr(ChatTemplate, "render", slow)
    async with machine(monkeypatch, Counting(), template="{{ messages[0].content }}") as engine:
        task = asyncio.create_task(engine.chat([{"role": "user", "content": "Hi"}], max_tokens=2))
        await until(entered.is_set)
        await tokens_meanwhile(engine)
        go.set()
        assert (await task).usage.prompt_tokens == 2


async def test_the_loop_turns_while_the_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting(hold=threading.Event())
    async with machine(monkeypatch, model) as engine:
        task = asyncio.create_task(engine.generate([1], max_tokens=3))
        await until(lambda: model.steps)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not task.done() and len(model.steps) == 1
        assert model.hold is not None
        model.hold.set()
        assert (await task).token_ids == (2, 3, 4)


async def test_the_app_may_need_all_its_threads() -> None:
    """Forty functions in threads, as many as anyio gives an app, wait for the engine; whatever needs a thread to be
    asked for has one all the same."""
    waiting: list[asyncio.Future[Completion]] = []
    asked: list[dict[str, Any]] = [
        {"prompt": "word " * 200},
        {"prompt": "a", "bad_words": ["bb"]},
        {"prompt": "a", "json_schema": {"type": "object", "properties": {"a" * 1_000: {"type": "null"}}}},
        {"prompt": "a", "stop": ["b" * 1_000]},
    ]
    async with Engine(SimModel(), device="sim") as engine:

        def endpoint(k: int) -> Completion:
            return anyio.from_thread.run(partial(engine.generate, **asked[k % 4], max_tokens=4))

        waiting += [asyncio.ensure_future(anyio.to_thread.run_sync(endpoint, k)) for k in range(40)]
        assert all(done.finish_reason in ("length", "stop") for done in await asyncio.gather(*waiting))


async def test_an_app_whose_threads_are_taken_starts_an_engine() -> None:
    engine = Engine(SimModel(), device="sim")
    go = threading.Event()

    def hold() -> None:
        assert go.wait(60)

    taken = [asyncio.ensure_future(anyio.to_thread.run_sync(hold)) for _ in range(40)]
    await engine.start()
    await engine.aclose()
    go.set()
    await asyncio.gather(*taken)
