"""Which sizes are captured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aphoton.device.cuda.graphs import DecodeGraphs, PieceGraphs, buckets, token_buckets


@given(st.integers(1, 4096))
def test_every_batch_has_a_graph_not_much_larger(max_rows: int) -> None:
    graphs = object.__new__(DecodeGraphs)
    graphs.sizes = buckets(max_rows)
    assert graphs.sizes == sorted(set(graphs.sizes)) and graphs.sizes[-1] == max_rows
    for rows in {1, 2, 3, 5, 9, 100, 129, 300, 700, max_rows // 2, max_rows}:
        if 1 <= rows <= max_rows:
            size = graphs.size(rows)
            assert rows <= size <= max(2 * rows, rows + 8) and size in graphs.sizes


@pytest.mark.parametrize("most", [1, 16, 17, 200, 2304, 100_000])
def test_steps_with_prompts(most: int) -> None:
    graphs = object.__new__(PieceGraphs)
    graphs.sizes = token_buckets(most)
    assert graphs.sizes == sorted(graphs.sizes) and all(size % 4 == 0 for size in graphs.sizes)
    for tokens in {1, 16, 17, 33, most}:
        size = graphs.size(tokens)
        if tokens <= min(most, 2304):
            assert size is not None and tokens <= size <= max(16, 2 * tokens)
    assert graphs.size(2305) is None
