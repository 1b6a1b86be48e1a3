"""Services over small models."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from sayer import let_sims_chat, saying
from serving import Served, serving
from talker import make_talker

from aphoton_serve.local import LocalBackend


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and on a busy machine lose much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a chat template: random weights, and no end token."""
    return make_talker(tmp_path_factory.mktemp("talker"))


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
