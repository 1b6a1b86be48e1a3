"""`frozen_heap`."""

import gc
import sys
import weakref

from aphoton.heap import frozen_heap


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_looked_at_no_more_until_the_end() -> None:
    before, circle = gc.get_freeze_count(), Circle()
    gone = weakref.ref(circle)
    with frozen_heap():
        assert gc.get_freeze_count() > before
        del circle
        gc.collect()
        assert gone() is not None
        later = weakref.ref(Circle())
        gc.collect()
        assert later() is None
    gc.collect()
    assert gone() is None


def test_collections_are_short_meanwhile() -> None:
    before, collected = gc.get_threshold(), list[int]()
    gc.callbacks.append(lambda phase, info: collected.append(info["generation"]) if phase == "start" else None)
    try:
        with frozen_heap():
            collected.clear()
            kept = [[] for _ in range(20 * before[0])]
    finally:
        del gc.callbacks[-1]
    assert len(kept) == 20 * before[0]
    if sys.version_info < (3, 14):
        assert collected.count(1) >= 4
    assert gc.get_threshold() == before
