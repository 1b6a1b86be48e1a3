"""What one request, or one file, must not do to the others."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers.models import BPE

from aphoton import Engine, InvalidRequest, SimModel
from aphoton.device import source
from aphoton.models import RandomCheckpoint
from aphoton.models.random import SHAPES
from aphoton.text import Tokenizer


@pytest.fixture
def wide_tokenizer(tmp_path: Path) -> Tokenizer:
    """One that knows a token more than the model, and an end token far beyond."""
    vocabulary = {chr(97 + i % 26) * (1 + i // 26): i for i in range(512)}
    tokenizer = Tokenizers(BPE(vocabulary, []))
    tokenizer.add_tokens(["<extra>"])
    tokenizer.decoder = None
    path = tmp_path / "tokenizer.json"
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    path.write_text(json.dumps(content))
    return Tokenizer.from_json(path)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_a_token_that_the_model_does_not_have(
    kernels: Any, wide_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomCheckpoint, "tokenizer", lambda self: wide_tokenizer)
    assert wide_tokenizer.encode("a<extra>")[-1] == SHAPES["tiny"].vocab_size
    async with Engine("random:tiny", kernels=kernels, max_rows=2) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.generate("a<extra>", max_tokens=2)
        assert refused.value.field == "prompt"
        assert len((await engine.generate("a", max_tokens=2, ignore_eos=True)).token_ids) == 2


async def test_an_end_token_that_the_model_does_not_have(
    wide_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomCheckpoint, "tokenizer", lambda self: wide_tokenizer)
    monkeypatch.setattr(wide_tokenizer, "eos_token_ids", (2, 100_000, 2**40))
    async with Engine("random:tiny", max_rows=2) as engine:
        assert 100_000 not in engine.limits.eos_token_ids and 2 in engine.limits.eos_token_ids
        assert len((await engine.generate([1], max_tokens=3, min_tokens=3)).token_ids) == 3


@pytest.mark.parametrize("top_p", [1e-46, 5e-324, 1e-30])
async def test_a_top_p_below_every_probability_is_greedy(top_p: float) -> None:
    async with Engine("random:tiny", max_rows=2) as engine:
        greedy = await engine.generate([1, 2, 3], max_tokens=6, ignore_eos=True)
        drawn = await engine.generate([1, 2, 3], max_tokens=6, temperature=1.0, top_p=top_p, ignore_eos=True)
    assert drawn.token_ids == greedy.token_ids


@pytest.mark.parametrize("field", ["kv_pages", "kv_memory"])
@pytest.mark.parametrize("size", [2**31 - 2, 10**30])
async def test_more_kv_cache_than_there_is_memory(field: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(source.KVCache):
        def __init__(self, **shape: Any) -> None:
            raise MemoryError

    monkeypatch.setattr(source, "KVCache", Full)
    with pytest.raises(InvalidRequest) as refused:
        await Engine("random:tiny", **{field: size}).start()
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 10**1000),
        ("max_tokens", -(10**1000)),
        ("stop", ["x" * 10_000]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", list(range(1000))),
    ],
)
async def test_values_beyond_all_measure_are_refused_by_name(field: str, value: Any) -> None:
    async with Engine(SimModel()) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.generate([1], **{field: value})
    assert refused.value.field == field
