"""What a step has sampled, on the host."""

import pytest
import torch
from device.batches import batch

from aphoton.device.base import PENDING
from aphoton.device.cuda.slot import SlotBuffers


@pytest.mark.parametrize("finite", [[1, 1, 1], [1, 0, 1], [-1, 1, 1], [1, -1, 0]])
def test_rows_that_have_no_token_are_told(finite: list[int]) -> None:
    """Whatever the sizes of the steps before; and what padding samples is nobody's."""
    slot = SlotBuffers(None, tokens=8, rows=6, pages=8, sampling=4, mask=1, device=torch.device("cpu"))
    for size, rows in ((3, 3), (6, 6), (4, 3)):
        state = [1] * (rows - 3) + finite
        slot.batch, slot.size = batch(*((row + 1, 3, [PENDING]) for row in range(rows))), size
        slot.tokens[:] = torch.arange(size) + size
        slot.finite[:] = torch.tensor(state + [0] * (size - rows))
        slot.fetch()
        results = slot.results(0.0, 1.0)
        assert results.tokens.tolist() == [size + row for row in range(rows)]
        if min(finite) == 1:
            assert results.faulty is None and results.barred is None
        else:
            assert results.faulty is not None and results.faulty.tolist() == [value == 0 for value in state]
            assert results.barred is not None and results.barred.tolist() == [value < 0 for value in state]
