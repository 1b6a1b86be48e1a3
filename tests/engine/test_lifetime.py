"""Loops, processes, starts and closings."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from engine.machines import Counting, machine
from engine.simulated import Probe, saying
from engine.waiting import assert_nothing_held, turns, until

import aphoton.engine
from aphoton import AphotonError, Completion, Engine, EngineClosed, InvalidRequest, SimModel
from aphoton.device.sim import SimDevice
from aphoton.loader import Loaded, load


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, which must end by itself."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


# Importing


def test_importing_changes_nothing_in_the_process() -> None:
    done = run_python(
        """
        import asyncio, logging, signal, sys, threading, warnings
        import numpy  # which adds warning filters of its own
        handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}
        hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
        level, loggers = logging.root.level, logging.root.handlers[:]
        filters = warnings.filters[:]
        import aphoton
        assert asyncio.events._event_loop_policy is None, "a policy was set"
        assert {s: signal.getsignal(s) for s in signal.valid_signals()} == handlers
        assert (sys.excepthook, sys.unraisablehook, threading.excepthook) == hooks
        assert (logging.root.level, logging.root.handlers) == (level, loggers)
        assert not any(logging.getLogger(name).handlers for name in logging.root.manager.loggerDict)
        assert warnings.filters == filters
        assert threading.active_count() == 1
        heavy = {"torch", "ray", "flashinfer", "transformers", "huggingface_hub", "triton"} & set(sys.modules)
        assert not heavy, heavy

        async def main():
            async with aphoton.Engine(aphoton.SimModel()) as engine:
                assert len((await engine.generate([1], max_tokens=3, ignore_eos=True)).token_ids) == 3

        asyncio.run(main())
        assert "torch" not in sys.modules, "the simulated device needs none"
        """
    )
    assert done.returncode == 0, done.stderr


async def test_running_changes_no_default_of_torch(tiny: Engine) -> None:
    def defaults() -> list[object]:
        return [
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(),
            torch.initial_seed(),
            torch.get_rng_state().tolist(),
        ]

    before = defaults()
    async with Engine("random:tiny:5", max_rows=2) as engine:
        await asyncio.gather(engine.generate([1], temperature=1, max_tokens=3), tiny.generate([1], max_tokens=3))
    assert defaults() == before


# Loops


async def ask(engine: Engine, **sampling: Any) -> tuple[int, ...]:
    return (await engine.generate([5, 6, 7], max_tokens=10, **sampling)).token_ids


async def once() -> tuple[int, ...]:
    async with Engine("random:tiny", dtype="float32") as engine:
        return await ask(engine)


def test_a_second_asyncio_run_with_a_new_engine() -> None:
    assert asyncio.run(once()) == asyncio.run(once())


def test_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def cancelled() -> None:
        async with Engine("random:tiny", dtype="float32") as engine:
            task = asyncio.create_task(engine.generate([1], max_tokens=1000))
            await until(lambda: engine.stats().running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not engine.stats().zombies)
            assert_nothing_held(engine)

    assert uvloop.run(once()) == asyncio.run(once())
    uvloop.run(cancelled())


@pytest.mark.parametrize("model", [SimModel(), "random:tiny"])
def test_the_same_engine_on_another_loop_is_a_clear_error(model: Any) -> None:
    engine = Engine(model)
    home = asyncio.new_event_loop()
    home.run_until_complete(engine.start())

    async def abroad() -> None:
        async def submit() -> None:
            async for _ in engine.stream([1]):
                pass

        for call in (
            engine.generate([1]),
            submit(),
            engine.chat([]),
            engine.tokenize("x"),
            engine.detokenize([1]),
            engine.aclose(),
        ):
            with pytest.raises(AphotonError, match="another event loop") as caught:
                await call
            assert type(caught.value) is AphotonError
        with pytest.raises(EngineClosed, match="once"):
            await engine.start()

    asyncio.run(abroad())
    done = home.run_until_complete(engine.generate([1], max_tokens=2, ignore_eos=True))
    assert len(done.token_ids) == 2, "it still runs at home"
    home.run_until_complete(engine.aclose())
    home.run_until_complete(home.shutdown_default_executor())
    home.close()


async def test_several_engines_in_one_process() -> None:
    async with (
        Engine("random:tiny", dtype="float32") as one,
        Engine("random:tiny:7", dtype="float32", pipeline_depth=1) as other,
        Engine(SimModel()) as simulated,
    ):
        alone = [await ask(engine) for engine in (one, other, simulated)]
        assert alone[0] != alone[1]
        together = await asyncio.gather(*(ask(engine) for engine in (one, other, simulated) * 5))
        assert list(together) == alone * 5
        await other.aclose()
        assert await ask(one) == alone[0]
        with pytest.raises(EngineClosed):
            await ask(other)


def test_engines_on_loops_of_several_threads() -> None:
    results: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(once()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and len(set(results)) == 1


# Starting


async def assert_closed(engine: Engine) -> None:
    calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: engine.generate([1]),
        lambda: engine.chat([{"role": "user", "content": "Hi"}]),
        lambda: engine.stream([1]).completion(),
        lambda: engine.stream([1]).__aenter__(),
        lambda: engine.stream([1]).__anext__(),
        lambda: engine.tokenize("x"),
        lambda: engine.detokenize([1]),
    ]
    for call in calls:
        with pytest.raises(EngineClosed):
            await call()
    with pytest.raises(EngineClosed):
        engine.stats()
    with pytest.raises(EngineClosed):
        _ = engine.limits


async def test_not_started_closed_and_started_twice() -> None:
    engine = Engine(SimModel())
    await assert_closed(engine)
    assert await engine.start() is engine
    with pytest.raises(EngineClosed, match="once"):
        await engine.start()
    assert (await engine.generate([1], max_tokens=1)).usage.completion_tokens == 1, "and it still runs"
    await engine.aclose()
    await engine.aclose()
    await assert_closed(engine)
    with pytest.raises(EngineClosed, match="closed is not started again"):
        await engine.start()


async def test_closed_before_it_was_started() -> None:
    engine = Engine(SimModel())
    await engine.aclose()
    with pytest.raises(EngineClosed, match="closed is not started again"):
        await engine.start()


class SlowLoad:
    """A model that loads until the test lets it, or until nobody wants it any more."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.entered = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        patch.setattr(aphoton.engine, "load", self._load)

    def _load(self, model: Any, config: Any, progress: Any, unwanted: Callable[[], bool]) -> Loaded:
        self._loop.call_soon_threadsafe(self.entered.set)
        while not self.go.wait(0.001):
            if unwanted():
                raise EngineClosed("seen by the thread that loads")
        return load(model, config, progress, unwanted)


@pytest.fixture
async def slow_load(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlowLoad]:
    """And afterwards nothing was left that the loop complains of, such as a thread's error that nobody took."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    slow = SlowLoad(monkeypatch)
    yield slow
    slow.go.set()
    gc.collect()
    assert not complaints


@pytest.mark.parametrize("model", [SimModel(), "random:tiny"])
async def test_cancelled_while_it_loads(slow_load: SlowLoad, model: Any) -> None:
    engine = Engine(model)
    task = asyncio.create_task(engine.start())
    await slow_load.entered.wait()
    with pytest.raises(EngineClosed):
        await engine.generate([1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_closed(engine)
    await engine.aclose()
    await assert_closed(engine)


@pytest.mark.parametrize("model", [SimModel(), "random:tiny"])
async def test_closed_while_it_loads(slow_load: SlowLoad, model: Any) -> None:
    engine = Engine(model)
    task = asyncio.create_task(engine.start())
    await slow_load.entered.wait()
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await task
    await assert_closed(engine)


@pytest.mark.parametrize("model", [SimModel(), "random:tiny"])
async def test_a_scope_cancelled_while_it_loads(slow_load: SlowLoad, model: Any) -> None:
    engine = Engine(model)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def stop() -> None:
                await slow_load.entered.wait()
                scope.cancel()
                slow_load.go.set()

            group.start_soon(stop)
            await engine.start()
    assert scope.cancelled_caught
    await assert_closed(engine)
    await engine.aclose()


@pytest.fixture
def inline_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that takes no thread, so that every turn of a start is the same each time."""

    async def inline(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    monkeypatch.setattr(anyio.to_thread, "run_sync", inline)


@pytest.mark.parametrize("turn", range(12))
@pytest.mark.usefixtures("inline_load")
async def test_cancelled_at_any_turn_of_its_start(turn: int) -> None:
    engine = Engine(SimModel())
    task = asyncio.create_task(engine.start())
    await turns(turn)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_closed(engine)
    else:
        assert await ask(engine)
    await engine.aclose()
    await assert_closed(engine)


@pytest.mark.parametrize("turn", range(12))
@pytest.mark.usefixtures("inline_load")
async def test_closed_at_any_turn_of_its_start(turn: int) -> None:
    engine = Engine(SimModel())
    task = asyncio.create_task(engine.start())
    await turns(turn)
    started = task.done()
    await engine.aclose()
    if started:
        await task
    else:
        with pytest.raises(EngineClosed):
            await task
    await assert_closed(engine)


async def test_a_start_that_fails_behind_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[SimDevice] = []

    def fail(*args: Any, **settings: Any) -> None:
        raise MemoryError("no room for the rows")

    monkeypatch.setattr(SimDevice, "stop", lambda device: stopped.append(device))
    monkeypatch.setattr(aphoton.engine, "Scheduler", fail)
    engine = Engine(SimModel())
    with pytest.raises(MemoryError):
        await engine.start()
    assert len(stopped) == 1
    await assert_closed(engine)
    await engine.aclose()


# Closing


async def test_closing_ends_whoever_runs_or_waits() -> None:
    model = saying("forever", end=False)
    engine = await Engine(model, max_rows=1, max_waiting=1, pipeline_depth=2).start()
    tasks = [asyncio.create_task(engine.generate([1], max_tokens=None)) for _ in range(4)]
    reader = asyncio.create_task(anext(engine.stream([1])))
    await turns(10)
    assert (engine.stats().running, engine.stats().waiting) == (1, 4)
    await engine.aclose()
    for task in (*tasks, reader):
        with pytest.raises(EngineClosed):
            await task
    await assert_closed(engine)


async def test_a_stream_has_what_came_before_the_closing() -> None:
    engine = await Engine(saying("forever", end=False)).start()
    stream = engine.stream([1], max_tokens=None)
    text = (await anext(stream)).text
    await until(lambda: engine.stats().tokens >= 20)
    await engine.aclose()
    text += (await anext(stream)).text
    assert len(text) >= 20 and ("forever" * 10).startswith(text)
    with pytest.raises(EngineClosed):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(EngineClosed):
        await stream.completion()


@pytest.mark.parametrize("drain", [True, 1000, 1000.0])
@pytest.mark.parametrize("model", ["sim", "random:tiny"])
async def test_draining_runs_everyone_to_the_end_first(drain: bool | float, model: str) -> None:
    """Those that run, those that wait, and those at the door of a full queue: all have been asked for."""
    engine = await Engine(model, device="auto" if model != "sim" else "sim", max_rows=1, max_waiting=1).start()
    tasks = [asyncio.create_task(engine.generate([1 + i], max_tokens=20, ignore_eos=True)) for i in range(4)]
    await until(lambda: engine.stats().waiting == 3)
    closing = asyncio.create_task(engine.aclose(drain=drain))
    await turns(1)
    with pytest.raises(EngineClosed, match="closing"):
        await engine.generate([1])
    assert engine.stats().running == 1, "it can be watched meanwhile"
    for task in tasks:
        assert len((await task).token_ids) == 20
    await closing
    await assert_closed(engine)


async def test_draining_waits_for_those_who_are_not_at_the_door_yet(talker: Path) -> None:
    """In line before it, or away in a thread to be made tokens of: they have asked, too."""
    engine = await Engine(talker, max_rows=4).start()
    tasks = [asyncio.create_task(engine.generate([1 + i], max_tokens=5)) for i in range(20)]
    tasks.append(asyncio.create_task(engine.chat([{"role": "user", "content": "Hi"}], max_tokens=5)))
    tasks.append(asyncio.create_task(engine.generate("word " * 300, max_tokens=5, deadline=1000)))
    gone = asyncio.create_task(engine.generate("word " * 300))
    await turns(1)
    assert engine.stats().waiting > 8
    closing = asyncio.create_task(engine.aclose(drain=True))
    await turns(1)
    gone.cancel()
    with pytest.raises(EngineClosed, match="closing"):
        await engine.generate([1])
    assert [one.usage.completion_tokens for one in await asyncio.gather(*tasks)] == [5] * 22
    await closing
    await assert_closed(engine)


async def test_a_second_closing_refuses_those_who_are_not_at_the_door_yet() -> None:
    engine = await Engine("random:tiny").start()
    tasks = [asyncio.create_task(engine.generate([1 + i], max_tokens=1000)) for i in range(40)]
    await turns(1)
    draining = asyncio.create_task(engine.aclose(drain=True))
    await turns(1)
    await engine.aclose()
    await draining
    for task in tasks:
        with pytest.raises(EngineClosed):
            await task
    await assert_closed(engine)


async def test_draining_for_some_time_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting(hold=threading.Event())
    engine = await machine(monkeypatch, model, max_rows=1).start()
    tasks = [asyncio.create_task(engine.generate([1], max_tokens=5)) for _ in range(3)]
    await until(lambda: model.steps)
    closing = asyncio.create_task(engine.aclose(drain=0.001))
    for task in tasks:
        with pytest.raises(EngineClosed):
            await task
    assert not closing.done(), "a step is in flight, and what it touches is not freed"
    assert model.hold is not None
    model.hold.set()
    await closing
    await assert_closed(engine)


async def test_a_second_closing_cuts_a_drain_short() -> None:
    engine = await Engine(saying("forever", end=False), max_rows=1).start()
    tasks = [asyncio.create_task(engine.generate([1], max_tokens=None)) for _ in range(2)]
    await turns(5)
    draining = asyncio.create_task(engine.aclose(drain=True))
    await turns(5)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    assert not any(task.done() for task in tasks)
    patient = asyncio.create_task(engine.aclose(drain=True))
    await turns(5)
    await engine.aclose()
    await patient
    for task in tasks:
        with pytest.raises(EngineClosed):
            await task
    await assert_closed(engine)


@pytest.mark.parametrize("drain", ["soon", None, -1, float("nan"), 10**400, [1]], ids=lambda drain: f"{drain!r:.8}")
async def test_an_impossible_drain_is_refused_and_nothing_closed(drain: Any) -> None:
    async with Engine(SimModel()) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.aclose(drain=drain)
        assert caught.value.field == "drain"
        assert await ask(engine)


async def test_several_close_at_once() -> None:
    engine = await Engine("random:tiny").start()
    task = asyncio.create_task(engine.generate([1], max_tokens=1000))
    await turns(3)
    await asyncio.gather(*(engine.aclose() for _ in range(3)), engine.aclose(drain=True))
    with pytest.raises(EngineClosed):
        await task


async def test_leaving_the_context_by_an_error_closes_it_and_keeps_the_error() -> None:
    tasks: list[asyncio.Task[Completion]] = []

    async def fail() -> None:
        async with Engine(saying("forever", end=False)) as engine:
            tasks.append(asyncio.create_task(engine.generate([1], max_tokens=None)))
            await turns(5)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail()
    with pytest.raises(EngineClosed):
        await tasks[0]


async def test_closing_at_any_call_of_the_device() -> None:
    for calls in range(1, 25):
        for depth in (1, 2):
            probe = Probe()
            engine = await Engine(saying("Hello", probe=probe), pipeline_depth=depth, max_rows=1).start()
            closings: list[asyncio.Task[None]] = []

            def close(engine: Engine = engine, closings: list[asyncio.Task[None]] = closings) -> None:
                closings.append(asyncio.create_task(engine.aclose()))

            probe.after(calls, close)
            results = await asyncio.gather(
                *(engine.generate([1], max_tokens=10) for _ in range(2)), return_exceptions=True
            )
            await asyncio.gather(*closings)
            await engine.aclose()
            assert len(closings) == 1 or probe.total < calls + 1
            for result in results:
                if isinstance(result, Completion):
                    assert result.text == "Hello"
                else:
                    assert isinstance(result, EngineClosed)


# Without closing


@pytest.mark.parametrize("model", ['"random:tiny"', "aphoton.SimModel(eos_token_ids=())"])
def test_a_program_that_does_not_close_ends_all_the_same(model: str) -> None:
    done = run_python(
        f"""
        import asyncio, aphoton

        async def main():
            engine = await aphoton.Engine({model}).start()
            stream = engine.stream([1], max_tokens=2000)
            await anext(stream)
            tasks = [asyncio.create_task(engine.generate([1], max_tokens=2000)) for _ in range(100)]
            while engine.stats().running < 2:
                await asyncio.sleep(0)
            return engine, stream  # with the loop closed, there is nobody to tell of the stream's end

        asyncio.run(main())
        print("done")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_loop_that_is_dropped_without_closing_anything_does_not_hold_the_program() -> None:
    done = run_python(
        """
        import asyncio, aphoton, warnings
        warnings.simplefilter("ignore")  # asyncio itself tells of the loop

        loop = asyncio.new_event_loop()
        engine = loop.run_until_complete(aphoton.Engine("random:tiny").start())
        loop.run_until_complete(engine.generate([1], max_tokens=2))
        print("done")
        """
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
