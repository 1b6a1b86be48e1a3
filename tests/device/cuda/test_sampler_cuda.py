"""What a step asks of the sampler beside the likeliest tokens."""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from device.batches import batch

from aphoton.device.base import PENDING, Limits
from aphoton.device.cuda.sampler import GREEDY, CudaSampler
from aphoton.device.cuda.staging import Staging
from aphoton.sampling import RowSampling


def test_no_more_than_its_rows_need() -> None:
    device = torch.device("cpu")
    limits = Limits(vocab_size=300, max_model_len=64, pages=9, eos_token_ids=(2,))
    sampler, staging = CudaSampler(max_rows=4, limits=limits, device=device), Staging(5000, device)
    early, drawn = RowSampling(seed=1, row=1, min_tokens=3, banned=(2,)), RowSampling(seed=1, row=2, temperature=1.0)
    sampler.stage([early, drawn, RowSampling(seed=1, row=3)], staging)

    def drawn_rows(*rows: int, count: int, late: Sequence[int] = (), partial: Sequence[int] = ()) -> list[int] | None:
        """Which rows a kernel samples beside `greedy`; None: there is no such kernel."""
        launched = batch(*((row, 9, [PENDING]) for row in rows), counts=[count] * len(rows), late=late, partial=partial)
        staging.begin()
        step = sampler.prepare(launched, 4, staging)
        assert (step is GREEDY) == (step.drawn is None)
        staging.send()
        return None if step.drawn is None else step.drawn.tolist()

    assert drawn_rows(3, count=0) is None
    assert drawn_rows(1, 3, count=2) == [1, 3, 0, 0]
    assert drawn_rows(1, 3, count=3) is None, "it may end now"
    assert drawn_rows(3, 2, count=9) == [3, 2, 0, 0]
    assert drawn_rows(3, 2, 1, count=9, late=(2,)) is None
    assert drawn_rows(1, 3, count=0, partial=(1,)) is None
    assert drawn_rows(1, 2, count=0, late=(1,)) == [0, 2, 0, 0]
    # The row is another one's.
    sampler.stage([RowSampling(seed=1, row=1), RowSampling(seed=1, row=2, min_tokens=1, banned=(2,))], staging)
    assert drawn_rows(1, 2, count=1) is None
    assert drawn_rows(1, 2, count=0) == [1, 2, 0, 0]
