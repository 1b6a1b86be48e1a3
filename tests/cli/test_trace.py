"""``aphoton trace``: a trace that is one, and a picture that is one."""

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli.running import Run

Event = dict[str, Any]


def _trace(run: Run, folder: Path, *arguments: str) -> dict[str, list[Event]]:
    """The events of each recording, by its name."""
    file = folder / "trace.json"
    result = run("trace", *arguments, "--out", str(file))
    assert str(file) in result.stdout.splitlines()
    document = json.loads(file.read_text())
    assert document["displayTimeUnit"] == "ms"
    events: list[Event] = document["traceEvents"]
    for event in events:
        assert event["ph"] in "MXC" and event["pid"] >= 1 and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
        if event["ph"] == "C":
            assert all(type(value) is int and value >= 0 for value in event["args"].values())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return {name: [e for e in events if e["pid"] == pid] for pid, name in names.items()}


def _track(events: list[Event], name: str) -> list[Event]:
    (thread,) = (e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == name)
    return [e for e in events if e["ph"] == "X" and e["tid"] == thread]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _in_order(events: list[Event]) -> bool:
    return all(after["ts"] >= _end(before) - 1e-3 for before, after in pairwise(events))


def _check(events: list[Event], *, steps: int, depth: int) -> None:
    host, device = _track(events, "host"), _track(events, "device")
    ticks = [e for e in host if e["cat"] == "tick"]
    phases = [e for e in host if e["cat"] != "tick"]
    assert _in_order(ticks) and _in_order(phases)
    for phase in phases:
        assert sum(t["ts"] - 1e-3 <= phase["ts"] and _end(phase) <= _end(t) + 1e-3 for t in ticks) >= 1
    for name in ("launch", "wait", "commit", "sample"):
        numbers = [e["args"]["step"] for e in phases if e["name"] == name]
        assert numbers == sorted(numbers) and len(set(numbers)) == steps
    order = [(e["name"], e["args"]["step"]) for e in phases]
    first = order[0][1]
    for step in range(first, first + steps - 1):
        # With two steps in flight the next one is launched before this one is committed.
        assert (order.index(("launch", step + 1)) < order.index(("commit", step))) == (depth == 2)
        assert order.index(("commit", step)) < order.index(("sample", step + 1))

    work = [e for e in device if e["cat"] == "device"]
    assert [e["args"]["step"] for e in work] == list(range(first, first + steps))
    assert _in_order(sorted(device, key=lambda e: (e["ts"], _end(e))))
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"rows", "sequences", "zombies"}


@pytest.mark.parametrize("depth", [1, 2])
def test_simulated(run: Run, tmp_path: Path, depth: int) -> None:
    traces = _trace(
        run, tmp_path, "--device", "sim", "--depth", str(depth), "--concurrency", "3", "--output-tokens", "10"
    )
    ((name, events),) = traces.items()
    assert name == f"sim, script kernels, 3 streams, depth {depth}"
    _check(events, steps=10, depth=depth)
    idle = [e for e in _track(events, "device") if e["cat"] == "idle"]
    assert len(idle) == (9 if depth == 1 else 0)  # the default costs are the device's, mostly
    running = [e["args"]["running"] for e in events if e["name"] == "sequences"]
    assert running == [3] * 9 + [0]


def test_a_model_at_both_depths_with_a_picture(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "timeline.png"
    traces = _trace(
        run, tmp_path, "random:tiny", "--dtype", "float32", "--kernels", "torch", "--depth", "1,2",
        "--concurrency", "4", "--prompt-tokens", "5", "--output-tokens", "8", "--png", str(png),
    )  # fmt: skip
    for depth, (name, events) in enumerate(traces.items(), 1):
        assert name == f"random:tiny, float32, torch kernels, 4 streams, depth {depth}"
        # A streaming client may be a step late with its request: then there is a step more.
        steps = len([e for e in _track(events, "device") if e["cat"] == "device"])
        assert 8 <= steps <= 12
        _check(events, steps=steps, depth=depth)
    head = png.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    assert width > 1000 and height > 400


def test_a_window(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--device", "sim", "--concurrency", "1", "--output-tokens", "4", "--out", str(tmp_path / "t.json"))
    pictures = []
    for window in ("3", "30"):
        file = tmp_path / f"{window}.png"
        run("trace", *arguments, "--png", str(file), "--window", window)
        pictures.append(file.read_bytes())
    assert pictures[0] != pictures[1]
