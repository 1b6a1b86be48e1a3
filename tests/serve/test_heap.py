"""`freeze_heap`."""

import atexit
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from aphoton_serve.heap import freeze_heap


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    calls: list[Any] = []
    monkeypatch.setattr(atexit, "register", calls.append)
    yield calls
    gc.unfreeze()


def test_what_is_there_is_looked_at_no_more(at_exit: list[Any]) -> None:
    circle: list[Any] = []
    circle.append(circle)
    before = gc.get_freeze_count()
    freeze_heap()
    assert gc.get_freeze_count() > before
    assert not any(one is circle for one in gc.get_objects())
    (thaw,) = at_exit
    thaw()
    assert gc.get_freeze_count() == 0
    assert any(one is circle for one in gc.get_objects())
