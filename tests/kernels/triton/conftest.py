"""Where there is no GPU, the kernels run in Triton's interpreter (see the root's conftest): the same tests, on small
shapes."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
