"""Fixtures that all tests share."""

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import settings

from aphoton.errors import ModelError


def has_gpu_driver() -> bool:
    """Without torch, which most rooms are tested without."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# Where there is no GPU, kernels run in Triton's interpreter. It must be told before anybody imports triton, and torch
# does when transformers makes a model.
if not has_gpu_driver():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 warns where nothing says whether products and sums may be fused; before, they always were.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# The scheduler asserts its invariants at every step.
os.environ.setdefault("APHOTON_DEBUG", "1")
# An example that takes long says more about the machine than about the code; pytest-timeout ends what hangs.
settings.register_profile("aphoton", deadline=None)
settings.load_profile("aphoton")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. Where it cannot be fetched, tests that need it are skipped, unless
    APHOTON_REQUIRE_MODEL=1."""
    from aphoton.models.hub import resolve  # not at the top: most rooms are tested without torch

    try:
        return resolve("smollm2")
    except ModelError as error:
        if os.environ.get("APHOTON_REQUIRE_MODEL") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a chat template: random weights, and no end token."""
    from talker import make_talker  # not at the top, either

    return make_talker(tmp_path_factory.mktemp("talker"))
