"""One thread for torch: models this small gain nothing from more, and threads that wait for each other on a busy
machine lose much."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

__all__ = ["one_thread", "one_torch_thread"]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For all tests of a folder whose conftest imports this."""
    with one_torch_thread():
        yield
