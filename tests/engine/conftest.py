"""Engines on the small random model."""

from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from aphoton import Engine


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that spin while they wait for each other take far longer than one alone, when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
async def tiny() -> AsyncIterator[Engine]:
    async with Engine("random:tiny", dtype="float32", max_rows=8, kv_pages=200) as engine:
        yield engine
