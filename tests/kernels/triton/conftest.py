"""Where there is no GPU, the kernels run in Triton's interpreter: the same tests, on small shapes."""

import os

import pytest
import torch

# Before a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 warns where nothing says whether products and sums may be fused; before, they always were.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
