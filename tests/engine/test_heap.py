"""`frozen_heap`."""

import gc
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
