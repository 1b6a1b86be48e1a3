"""What is packed arrives where it was said to."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aphoton.device.cuda.staging import ALIGNED, Staging

arrays = st.lists(st.tuples(st.lists(st.integers(-9, 9), max_size=9), st.integers(0, 5)), max_size=6)


@given(arrays, arrays)
def test_arrays_arrive(first: list[tuple[list[int], int]], second: list[tuple[list[int], int]]) -> None:
    staging = Staging(200, torch.device("cpu"))
    for step in (first, second):  # the second one over the first one's leavings
        staging.begin()
        places = [staging.put(np.array(values, np.int32), len(values) + more) for values, more in step]
        staging.send()
        for place, (values, more) in zip(places, step, strict=True):
            assert place.tolist() == values + [0] * more
            assert place.storage_offset() % ALIGNED == 0


def test_the_same_sizes_have_the_same_places() -> None:
    staging = Staging(100, torch.device("cpu"))
    places = []
    for count in (0, 3):
        staging.begin()
        sizes = (8, 8, 24)
        places.append([staging.put(np.ones(count, np.int32), size).data_ptr() for size in sizes])
    assert places[0] == places[1]
