"""What is packed arrives where it was said to."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

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


def test_what_is_written_in_place_stays_there() -> None:
    staging = Staging(40, torch.device("cpu"))
    room = staging.room(6)
    room[:] = range(6)
    staging.begin()
    first = staging.put(room.reshape(2, 3), 8)
    other = staging.put(room[2:4], 2)
    staging.send()
    assert first.tolist() == [0, 1, 2, 3, 4, 5, 0, 0] and other.tolist() == [2, 3]
    assert room.tolist() == [*range(6)]


@pytest.mark.parametrize(
    "part",
    [lambda room: room[2:], lambda room: room[:6], lambda room: room[::2], lambda room: room.reshape(2, 4).T],
    ids=["behind", "before", "every other", "transposed"],
)
def test_whatever_part_of_it_is_put(part: Callable[[NDArray[np.int32]], NDArray[np.int32]]) -> None:
    staging = Staging(40, torch.device("cpu"))
    room = staging.room(8)
    room[:] = range(8)
    wanted = part(room).ravel().tolist()
    place = staging.put(part(room))
    staging.send()
    assert place.tolist() == wanted


def test_the_same_sizes_have_the_same_places() -> None:
    staging = Staging(100, torch.device("cpu"))
    places = []
    for count in (0, 3):
        staging.begin()
        sizes = (8, 8, 24)
        places.append([staging.put(np.ones(count, np.int32), size).data_ptr() for size in sizes])
    assert places[0] == places[1]
