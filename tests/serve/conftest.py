"""Services over small models."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from onethread import one_thread as one_thread
from sayer import let_sims_chat, saying
from serving import Served, serving

from aphoton_serve.local import LocalBackend


@pytest.fixture
async def real(talker: Path) -> AsyncIterator[Served]:
    """Random weights on the CPU: ``tiny``, which cannot chat, and ``talker``, which can."""
    backend = LocalBackend(
        {"tiny": "random:tiny", "talker": talker}, dtype="float32", device="cpu", max_rows=8, max_model_len=2048
    )
    async with serving(backend) as served:
        yield served


@pytest.fixture
def sims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated models can chat."""
    let_sims_chat(monkeypatch)


@pytest.fixture
async def hello(sims: None) -> AsyncIterator[Served]:
    """``hello`` says hello; ``endless`` goes on and on."""
    models = {"hello": saying("Hello, wörld!"), "endless": saying("la ", end=False, max_model_len=1_000_000)}
    async with serving(LocalBackend(models, max_rows=4, max_waiting=4, kv_pages=300_000)) as served:
        yield served
