"""`Waiting` against a sorted list."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aphoton.sampling import RowSampling
from aphoton.scheduler.sequence import Sequence
from aphoton.scheduler.waiting import Waiting


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "run", "return"]), st.integers(-2, 2), st.integers(0, 99))))
def test_lower_priorities_first_and_the_order_of_arrival_inside(history: list[tuple[str, int, int]]) -> None:
    waiting = Waiting()
    there: list[Sequence] = []
    running: list[Sequence] = []
    for arrival, (act, priority, which) in enumerate(history):
        if act == "add":
            new = Sequence(np.array([1], np.int32), limit=1, sampling=RowSampling(seed=0), priority=priority)
            new.arrival = arrival
            waiting.add(new)
            there.append(new)
        elif act in ("remove", "run") and there:
            there.sort(key=lambda one: (one.priority, one.arrival))
            gone = there.pop(which % len(there) if act == "remove" else 0)
            waiting.remove(gone)
            if act == "run":
                running.append(gone)
        elif act == "return" and running:
            back = running.pop(which % len(running))
            waiting.put_back(back)
            there.append(back)
        assert list(waiting) == sorted(there, key=lambda one: (one.priority, one.arrival))
        assert len(waiting) == len(there)
