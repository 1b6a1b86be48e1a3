"""Updates of the page tables."""

import pytest
import torch

page_update = pytest.importorskip("aphoton.kernels.triton.page_update", reason="triton is not installed")


@pytest.mark.parametrize("count", [0, 1, 130, 300])
def test_update_tables(count: int, device: str) -> None:
    generator = torch.Generator().manual_seed(count)
    tables = torch.randint(1, 99, (12, 37), generator=generator, dtype=torch.int32)
    tables[0] = 0
    places = torch.randperm(11 * 37, generator=generator)[:320] + 37
    updates = torch.stack((places // 37, places % 37, torch.arange(100, 420)), dim=1).to(torch.int32)
    updates[min(count, 320) - 2 : count] = 0  # padding
    expected = tables.clone()
    row, index, page = updates[:count].long().unbind(dim=1)
    expected[row, index] = page.int()
    tables = tables.to(device)
    page_update.update_tables(tables, updates.to(device), count)
    assert torch.equal(tables.cpu(), expected)
