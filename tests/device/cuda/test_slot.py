"""What a step has sampled, on the host."""

import pytest
import torch
from device.batches import batch

from aphoton.device.base import PENDING
from aphoton.device.cuda.slot import SlotBuffers


@pytest.mark.parametrize("finite", [[1, 1, 1], [1, 0, 1], [-1, 1, 1], [1, -1, 0]])
def test_rows_that_have_no_token_are_told(finite: list[int]) -> None:
    """Of the batch's rows: what padding samples is nobody's."""
    slot = SlotBuffers(None, tokens=8, rows=6, pages=8, sampling=4, mask=1, device=torch.device("cpu"))
    slot.batch = batch(*((row, 3, [PENDING]) for row in (1, 2, 3)))
    for size in (6, 4, 6):  # the larger one's leavings are behind the smaller one
        slot.size = size
        slot.tokens[:] = torch.arange(size) + size
        slot.finite[:] = torch.tensor([*finite, *[0] * (size - 3)])
        slot.fetch()
        results = slot.results(0.0, 1.0)
        assert results.tokens.tolist() == [size, size + 1, size + 2]
        if min(finite) == 1:
            assert results.faulty is None and results.barred is None
        else:
            assert results.faulty is not None and results.faulty.tolist() == [value == 0 for value in finite]
            assert results.barred is not None and results.barred.tolist() == [value < 0 for value in finite]
