"""Ways of awaiting an event, on events that are made up."""

import asyncio
from collections.abc import Callable

import pytest

from aphoton.device.cuda import wakeup
from aphoton.device.cuda.wakeup import MARGIN, STRATEGIES, TIMER, EventWait


class Event:
    """Happens when it has been asked ``asks`` times."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def query(self) -> bool:
        self.asks -= 1
        return self.asks <= 0

    def synchronize(self) -> None:
        self.asks = 0


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is slept: no time passes."""
    sleeps: list[float] = []
    turn: Callable[[float], object] = asyncio.sleep

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        await turn(0)  # type: ignore[misc]

    monkeypatch.setattr(wakeup.asyncio, "sleep", sleep)
    monkeypatch.setattr(wakeup.time, "perf_counter", lambda: 100.0)
    return sleeps


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("asks", [0, 1, 5])
async def test_the_loop_gets_a_turn_and_the_event_has_happened(name: str, asks: int) -> None:
    wait, event, turns = STRATEGIES[name](), Event(asks), []
    asyncio.get_running_loop().call_soon(turns.append, "other")
    await wait.wait(event, "kind", 0.0)
    assert event.asks <= 0 and turns == ["other"]
    wait.learn("kind", 0.001)
    wait.close()


async def test_what_is_not_known_is_polled(slept: list[float]) -> None:
    await EventWait().wait(Event(4), "new", since=0.0)
    assert slept == [0] * 4


async def test_a_long_wait_begins_with_a_timer(slept: list[float]) -> None:
    wait = EventWait()
    wait.learn("long", 0.010)
    await wait.wait(Event(2), "long", since=100.0)
    assert slept == [pytest.approx(0.010 - MARGIN), 0, 0]
    slept.clear()
    await wait.wait(Event(1), "long", since=100.0 - 0.010 + TIMER)  # the rest is short
    assert slept == [0]
    slept.clear()
    await wait.wait(Event(1), "other", since=100.0)  # kinds are apart
    assert slept == [0]


async def test_shorter_counts_at_once_and_longer_by_and_by(slept: list[float]) -> None:
    wait = EventWait()

    async def timer() -> float:
        slept.clear()
        await wait.wait(Event(1), "kind", since=100.0)
        return slept[0] + MARGIN

    wait.learn("kind", 0.010)
    wait.learn("kind", 0.006)
    assert await timer() == pytest.approx(0.006)
    wait.learn("kind", 0.016)
    assert await timer() == pytest.approx(0.007)
    for _ in range(100):
        wait.learn("kind", 0.016)
    assert await timer() == pytest.approx(0.016, rel=1e-3)
