"""`CudaDevice` and its kernels on a stand-in for CUDA, against the CPU's reference: the same tokens."""

import asyncio
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import msgspec
from device.cuda.standin import every_yield_is_a_turn, open_standin, stand_in, tiny
from engine.waiting import idle

import aphoton.engine
from aphoton import Completion, Engine, EngineConfig, EngineDead
from aphoton.loader import Loaded
from aphoton.models import RandomCheckpoint
from aphoton.models.random import SHAPES
from aphoton.text import ByteTokenizer

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # of the interpreter: random numbers overflow as meant
]

SHAPE = msgspec.structs.replace(SHAPES["tiny"], num_layers=2, vocab_size=300)
SETTINGS: dict[str, Any] = {"max_rows": 3, "max_model_len": 24, "kv_pages": 9, "page_size": 4, "max_step_tokens": 5}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 2, 3], {"max_tokens": 4}),
    ([7], {"max_tokens": 6, "temperature": 1.0, "top_k": 20, "seed": 3}),
    ([9, 8, 7, 6], {"max_tokens": 3, "logprobs": 2}),
    ([5, 5], {"max_tokens": 5, "min_tokens": 4, "stop_token_ids": list(range(0, 300, 5))}),
]


async def run(**settings: Any) -> list[Completion]:
    async with Engine("random:tiny", **{**SETTINGS, **settings}) as engine:
        done = await asyncio.gather(*(engine.generate(prompt, **sampling) for prompt, sampling in REQUESTS))
        await idle(engine)
        return done


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", SHAPE)
        return asyncio.run(run(dtype="float32", kernels="torch", device="cpu"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Engines are on the stand-in."""
    from aphoton.device.cuda import device

    def load(model: Any, config: EngineConfig, *_: Any) -> Loaded:
        source = tiny(RandomCheckpoint(SHAPE), config.max_model_len or 24)
        opened = open_standin(source, config, fused=config.kernels != "torch")
        return Loaded(device=opened, tokenizer=ByteTokenizer(SHAPE.vocab_size), chat_template=None)

    stand_in(monkeypatch)
    monkeypatch.setattr(device, "buckets", lambda max_rows: [2, max_rows])
    monkeypatch.setattr(device, "token_buckets", lambda most: [4, 8])
    monkeypatch.setattr(aphoton.engine, "load", load)
    return monkeypatch


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_tokens_of_the_reference(cuda: pytest.MonkeyPatch, depth: int, expected: list[Completion]) -> None:
    with every_yield_is_a_turn(cuda) as turns:
        found = await run(pipeline_depth=depth)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.finish_reason, ours.outputs[0].stop_reason) == (
            theirs.finish_reason,
            theirs.outputs[0].stop_reason,
        )
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert len(turns) > 6, "a launch is enqueued in several turns"


async def test_a_fault_in_the_middle_of_a_launch(cuda: pytest.MonkeyPatch) -> None:
    from aphoton.models.fused import FusedDecoder

    piece, calls = FusedDecoder.piece, iter(range(10_000))
    with every_yield_is_a_turn(cuda):
        async with Engine("random:tiny", **SETTINGS) as engine:
            cuda.setattr(
                FusedDecoder,
                "piece",
                lambda self, index, *rest: piece(self, index, *rest) if next(calls) != 4 else 1 / 0,
            )
            ended = await asyncio.gather(
                *(engine.generate(prompt, **sampling) for prompt, sampling in REQUESTS), return_exceptions=True
            )
            assert all(isinstance(one, EngineDead) for one in ended)
            assert isinstance(ended[0].__cause__, ZeroDivisionError)


async def test_all_rows_begin_with_the_same_pages(cuda: pytest.MonkeyPatch) -> None:
    """In one step: each sends all of them, which are many more than there are."""
    prompt = [*range(60)]
    settings = {"max_rows": 16, "max_model_len": 64, "kv_pages": 100, "page_size": 1, "max_step_tokens": 64}
    async with Engine("random:tiny", kernels="torch", **settings) as engine:
        first = await engine.generate(prompt, max_tokens=1)
        done = await asyncio.gather(*(engine.generate(prompt, max_tokens=2) for _ in range(16)))
        assert {one.usage.cached_tokens for one in done} == {59}
        assert {one.token_ids[:1] for one in done} == {first.token_ids}
        await idle(engine)


async def test_loading_leaves_the_page_tables_alone(cuda: pytest.MonkeyPatch) -> None:
    async with Engine("random:tiny", **{**SETTINGS, "max_rows": 9, "kv_pages": 60}) as engine:
        assert engine._loaded is not None
        device: Any = engine._loaded.device
        assert not device._rows.tables.any() and not device._rows.last[1:].any()
