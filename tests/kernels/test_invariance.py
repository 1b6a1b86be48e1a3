"""A token's logits are the same bits whoever is beside it, however its prompt was cut, on any number of threads."""

import numpy as np
import pytest
import torch
from kernels.decoders import Rows, needs_compiler, random_decoder

from aphoton.kernels.native import NativeDecoder
from aphoton.models import ModelConfig

pytestmark = needs_compiler

SETTINGS: dict[str, dict[str, object]] = {
    "three queries a KV head": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "windows, norms, biases": {"layer_windows": (None, 70, 600), "qk_norm": True, "qkv_bias": True, "head_dim": 80},
    "odd sizes": {"vocab_size": 101, "hidden_size": 75, "intermediate_size": 91, "head_dim": 6, "tie_embeddings": True},
    "deep": {"intermediate_size": 1501, "hidden_size": 740, "num_layers": 2},
}
DTYPES = [torch.float32, torch.bfloat16]


class Crowd:
    """Sequences on one native decoder, and what is expected of each: its logits when it decodes alone."""

    def __init__(self, name: str, dtype: torch.dtype, threads: int = 2) -> None:
        weights = random_decoder(dtype, **SETTINGS[name])
        self.config: ModelConfig = weights.config
        self.dtype = dtype
        self.decoder = NativeDecoder(weights, positions=2048, threads=threads)

    def rows(self) -> Rows:
        return Rows(self.decoder, self.config, self.dtype, tokens=32768)


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_alone_or_in_a_crowd(name: str, dtype: torch.dtype) -> None:
    crowd = Crowd(name, dtype)
    prompts = {row: tokens(length, row) for row, length in enumerate([1, 7, 64, 65, 200, 530, 1700, 33, 2, 15, 90])}
    others = {row: tokens(5 + 13 * row, row) for row in range(20, 45)}
    alone = {}
    for row, prompt in prompts.items():
        single = crowd.rows()
        alone[row] = [single.feed({row: prompt})[0], *(single.feed({row: [i]})[0] for i in range(3))]

    together = crowd.rows()
    logits = together.feed(prompts | others)
    for index, row in enumerate(prompts):
        assert torch.equal(logits[index], alone[row][0])
    for i in range(3):
        # Others leave and come, prefill and decode; the order of rows changes.
        rest = {row: tokens(1 + 20 * i, row) for row in list(others)[:: i + 1]}
        fed = rest | {row: [i] for row in reversed(prompts)}
        logits = together.feed(fed)
        for row in prompts:
            assert torch.equal(logits[list(fed).index(row)], alone[row][i + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_however_a_prompt_is_cut(name: str, dtype: torch.dtype) -> None:
    crowd = Crowd(name, dtype)
    prompt = tokens(620, 0)
    whole = crowd.rows().feed({0: prompt})[0]
    for cuts in ([300], [1], [619], [64, 512], [100, 101, 102, 350, 513]):
        rows = crowd.rows()
        for begin, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
            logits = rows.feed({0: prompt[begin:end]})
        assert torch.equal(logits[0], whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_decoded_or_prefilled_again(name: str, dtype: torch.dtype) -> None:
    """What preemption needs: the cache that decoding left and the one that a prefill of the same tokens leaves."""
    crowd = Crowd(name, dtype)
    text = tokens(580, 0)
    decoded = crowd.rows()
    decoded.feed({0: text[:500]})
    for at in range(500, 580):
        last = decoded.feed({0: [text[at]]})
    again = crowd.rows()
    assert torch.equal(again.feed({0: text}), last)
    torch.testing.assert_close(again.kv.data, decoded.kv.data, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_on_any_number_of_threads(name: str, dtype: torch.dtype) -> None:
    results = []
    for threads in (1, 2, 3):
        rows = Crowd(name, dtype, threads).rows()
        results.append(
            [
                rows.feed({0: tokens(700, 0), 1: tokens(1500, 1), 2: [3]}),
                rows.feed({0: [1], 1: [2], 2: tokens(20, 2)}),
                rows.feed({0: [3], 1: [4], 2: [5]}),
            ]
        )
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_behind_every_token(name: str, dtype: torch.dtype) -> None:
    """Those of the prompt fed token by token, in one step or cut, beside others. The row goes on as if never asked."""
    crowd = Crowd(name, dtype)
    prompt, other = tokens(300, 0), tokens(40, 1)
    single = crowd.rows()
    expected = torch.stack([single.feed({0: [token]})[0] for token in prompt])
    following, beside = single.feed({0: [3]})[0], crowd.rows().feed({1: other})[0]

    rows = crowd.rows()
    last, scored = rows.feed_scored({1: other, 0: prompt}, {0: 299})
    assert torch.equal(scored[0], expected[:299]) and torch.equal(last[1], expected[299])
    assert torch.equal(last[0], beside)
    assert torch.equal(rows.feed({0: [3]})[0], following)

    rows, found = crowd.rows(), []
    for begin, end in ((0, 1), (1, 130), (130, 131), (131, 300)):
        last, scored = rows.feed_scored({0: prompt[begin:end]}, {0: end - begin})
        found.append(scored[0])
        assert torch.equal(last[0], expected[end - 1])
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(rows.feed({0: [3]})[0], following)
