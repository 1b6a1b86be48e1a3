"""What a step asks of the sampler beside the likeliest tokens, and what late rows are sent."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from device.batches import batch

from aphoton.device.base import PENDING, Late, Limits
from aphoton.device.cuda.sampler import GREEDY, CudaSampler
from aphoton.device.cuda.staging import Staging
from aphoton.sampling import RowSampling, mask_words

LIMITS = Limits(vocab_size=300, max_model_len=64, pages=9, eos_token_ids=(2,))


def make() -> tuple[CudaSampler, Staging]:
    device = torch.device("cpu")
    return CudaSampler(max_rows=8, limits=LIMITS, device=device), Staging(5000, device)


@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_graph_finds_late_rows_where_it_was_captured(size: int, in_place: bool) -> None:
    """`late_padding` says where the graph reads, `write_late` what it finds there; behind that, nobody."""
    sampler, staging = make()
    words = mask_words(LIMITS.vocab_size)
    staging.begin()
    captured = sampler.late_padding(staging, size)
    assert captured.masks is not None
    launched = batch(*((row, 9, [PENDING]) for row in (7, 2, 5, 4)), counts=[3, 1, 4, 2], late=[7, 5, 4])
    masked = np.array([3, 0, 2], np.int32)
    for given in (masked, masked[:1]):  # the second one over the first one's leavings
        masks = np.arange(1, len(given) * words + 1, dtype=np.uint32).reshape(-1, words)
        if in_place:
            room = staging.room(masks.size).reshape(masks.shape).view(np.uint32)
            room[:] = masks
            masks = room
        wanted = masks.ravel().tolist()
        staging.begin()
        sampler.write_late(launched, Late(masked=given, masks=masks), staging, size)
        staging.send()
        many = len(given)
        for found, values in (
            (captured.places, [3, 0, 2]),
            (captured.rows, [4, 7, 5]),
            (captured.counts, [2, 3, 4]),
            (captured.masked, [0, 1, 2]),
        ):
            assert found[:size].tolist() == values[:many] + [0] * (size - many)
        assert captured.masks.tolist() == wanted + [0] * ((size - many) * words)


def test_no_more_than_its_rows_need() -> None:
    sampler, staging = make()
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
