"""Device faults end the engine for everyone; logits that are no numbers end one request."""

import asyncio
import threading
import time
from typing import Any, Literal

import pytest
from engine.machines import Counting, Gate, machine
from engine.simulated import Probe, saying
from engine.waiting import idle, turns, until

from aphoton import Completion, CompletionStream, Engine, EngineClosed, EngineDead, ModelError, SimModel
from aphoton.device.base import Results
from aphoton.scheduler.rows import Rows


async def assert_dead(engine: Engine, cause: BaseException | None = None) -> None:
    """Every later call raises `EngineDead` with the fault as its cause."""
    for call in (
        lambda: engine.generate([1]),
        lambda: anext(engine.stream([1])),
        lambda: engine.chat([]),
        lambda: engine.tokenize("x"),
        lambda: engine.detokenize([1]),
    ):
        with pytest.raises(EngineDead) as caught:
            await call()
        assert caught.value.__cause__ is cause
    with pytest.raises(EngineDead):
        engine.stats()
    with pytest.raises(EngineDead):
        _ = engine.limits
    with pytest.raises(EngineClosed):
        await engine.start()


async def read(stream: CompletionStream, tokens: list[int]) -> None:
    """Read a stream that has no good end."""
    async for piece in stream:
        tokens += piece.token_ids
        assert piece.finish_reason is None
        assert piece.logprobs is None or len(piece.logprobs) == len(piece.token_ids)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("calls", range(1, 16))
async def test_a_fault_ends_everyone_with_its_cause(calls: int, depth: Literal[1, 2]) -> None:
    """Whoever runs, waits, or is at the door; in whatever call of the device."""
    fault = OSError("the bus has fallen off the GPU")
    probe = Probe()

    def fail() -> None:
        raise fault

    model = saying("forever", end=False, probe=probe)
    engine = await Engine(model, pipeline_depth=depth, max_rows=2, max_waiting=1).start()
    probe.after(calls, fail)
    reader = engine.stream([1], max_tokens=100)
    text = ""

    async def read() -> None:
        nonlocal text
        async for piece in reader:
            text += piece.text

    tasks = [read(), *(engine.generate([1], max_tokens=100) for _ in range(5))]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert len({id(result) for result in results}) == 6, "an error of its own for each"
    for result in results:
        assert isinstance(result, EngineDead) and result.__cause__ is fault
        assert "the bus has fallen off the GPU" in str(result)
    assert ("forever" * 3).startswith(text)
    assert [piece async for piece in reader] == [], "nothing after the end"
    with pytest.raises(EngineDead):
        await reader.completion()
    await assert_dead(engine, fault)
    await engine.aclose()
    await assert_dead(engine, fault)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_fault_in_the_cpu_device(depth: Literal[1, 2], monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(monkeypatch, Counting(fail=20), pipeline_depth=depth) as engine:
        other = asyncio.create_task(engine.generate([100], max_tokens=100))
        tokens: list[int] = []
        with pytest.raises(EngineDead) as caught:
            await read(engine.stream([10], max_tokens=100), tokens)
        assert isinstance(caught.value.__cause__, OSError)
        assert tokens == list(range(11, 21))[: len(tokens)] and len(tokens) >= 9
        with pytest.raises(EngineDead):
            await other
        await assert_dead(engine, caught.value.__cause__)


async def test_a_fault_in_the_script() -> None:
    def script(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
        raise ZeroDivisionError

    async with Engine(SimModel(script=script)) as engine:
        with pytest.raises(EngineDead) as caught:
            await engine.generate([1])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_an_error_of_the_scheduler_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of an admission: nobody is left waiting for ever."""

    def assign(self: Rows, sequence: object) -> int:
        raise RecursionError("no rows today")

    async with Engine(SimModel(), max_rows=2) as engine:
        monkeypatch.setattr(Rows, "assign", assign)
        results = await asyncio.gather(*(engine.generate([1]) for _ in range(3)), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDead) and isinstance(result.__cause__, RecursionError)


async def test_a_fault_while_a_text_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with machine(monkeypatch, Counting(fail=20), tokenizer=gate) as engine:
        task = asyncio.create_task(engine.generate("x" * 5000))
        await until(gate.entered.is_set)
        with pytest.raises(EngineDead):
            await engine.generate([10])
        gate.go.set()
        with pytest.raises(EngineDead):
            await task


async def test_a_fault_while_it_drains() -> None:
    fault = OSError("too late")
    probe = Probe()

    def fail() -> None:
        raise fault

    engine = await Engine(saying("forever", end=False, probe=probe), max_rows=1).start()
    tasks = [asyncio.create_task(engine.generate([1], max_tokens=None)) for _ in range(3)]
    await turns(3)
    probe.after(10, fail)
    await engine.aclose(drain=True)
    for task in tasks:
        with pytest.raises(EngineDead):
            await task
    await assert_dead(engine, fault)


async def test_giving_up_after_a_fault_changes_nothing() -> None:
    probe = Probe()

    def fail() -> None:
        for task in tasks:
            task.cancel()
        raise OSError

    async with Engine(saying("forever", end=False, probe=probe), max_rows=1, max_waiting=1) as engine:
        tasks = [asyncio.create_task(engine.generate([1], max_tokens=100)) for _ in range(4)]
        probe.after(7, fail)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError | EngineDead) for result in results)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "top_k": 1, "seed": 1},
        {"temperature": 0.1, "seed": 1},
        {"logprobs": 2},
        {"stop": "never", "min_tokens": 30},
    ],
    ids=str,
)
async def test_logits_that_are_no_numbers_end_their_request_and_no_other(
    sampling: dict[str, Any], value: float, depth: Literal[1, 2], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {"max_tokens": 40, **sampling}
    async with machine(monkeypatch, Counting(poison=20, value=value), pipeline_depth=depth) as engine:
        stream = engine.stream([10], **sampling)
        others = [asyncio.create_task(engine.generate([100 + i], **sampling)) for i in range(4)]
        tokens: list[int] = []
        with pytest.raises(ModelError, match="not finite"):
            await read(stream, tokens)
        assert tokens == list(range(11, 21)), "what came before"
        assert [piece async for piece in stream] == []
        for i, other in enumerate(others):
            assert (await other).token_ids == tuple(range(101 + i, 141 + i))
        with pytest.raises(ModelError, match="not finite"):
            await engine.generate([20], **sampling)
        assert isinstance(await engine.generate([30], max_tokens=2), Completion)
        await idle(engine)


async def test_a_fault_in_a_step_that_nobody_awaits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting(fail=20, hold=threading.Event())
    async with machine(monkeypatch, model) as engine:
        task = asyncio.create_task(engine.generate([20], max_tokens=100))
        await until(lambda: model.steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.hold is not None
        model.hold.set()
        await until(lambda: engine._state == "dead")
        with pytest.raises(EngineDead):
            await engine.generate([1])


async def test_a_step_that_does_not_end_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    async with Engine(SimModel()) as engine:
        pipeline = engine._pipeline
        assert pipeline is not None
        results = pipeline.device.results

        async def stuck(slot: int) -> Results:
            await gate.wait()
            return await results(slot)

        monkeypatch.setattr(pipeline.device, "results", stuck)
        rest = time.monotonic()
        await until(lambda: time.monotonic() - rest > 0.05)
        assert engine.stats().stalled == 0.0
        task = asyncio.create_task(engine.generate([1, 2], max_tokens=100, ignore_eos=True))
        await until(lambda: engine.stats().stalled)
        assert engine.stats().stalled < time.monotonic() - rest - 0.05  # from when there was something to do
        await until(lambda: engine.stats().stalled > 0.1)
        stuck_for = engine.stats().stalled
        assert engine.stats().running == 1
        gate.set()
        await until(lambda: engine.stats().steps)
        assert engine.stats().stalled < stuck_for  # from the last step
        await task
        await idle(engine)
        assert engine.stats().stalled == 0.0
