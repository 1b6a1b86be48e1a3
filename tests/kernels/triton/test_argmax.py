"""Greedy tokens: ties, NaN and infinity, and vocabularies that are no whole blocks."""

import pytest
import torch
from torch import Tensor

argmax = pytest.importorskip("aphoton.kernels.triton.argmax", reason="triton is not installed")


def run(logits: Tensor, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, finite and the last tokens of ten rows, of which the batch has the rows 9, 8, ..."""
    batch, vocab = logits.shape
    rows = torch.arange(9, 9 - batch, -1, dtype=torch.int32, device=device)
    last = torch.full((10,), -7, dtype=torch.int32, device=device)
    tokens, finite = (torch.full((batch,), -7, dtype=torch.int32, device=device) for _ in range(2))
    scratch = argmax.argmax_scratch(12, vocab, device)
    argmax.argmax(logits.to(device), rows, last, tokens, finite, scratch)
    assert torch.equal(last[rows.long()], tokens) and (last[: 10 - batch] == -7).all()
    return tokens.cpu(), finite.cpu(), last.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 97, 2048, 5001])
def test_random(vocab: int, dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    tokens, finite, _ = run(logits, device)
    best = logits.float().amax(dim=1, keepdim=True)
    first = (logits.float() == best).int().argmax(dim=1)  # many are equal in bfloat16
    assert torch.equal(tokens.long(), first)
    assert finite.tolist() == [1] * 4


def test_ties_are_the_lowest(device: str) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [4999, 2500, 1700]] = 1.0
    logits[1, [4097, 2047, 2048]] = 1.0
    tokens, _, _ = run(logits, device)
    assert tokens.tolist() == [1700, 2047, 0]


def test_what_is_not_finite(device: str) -> None:
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    logits[0, 3000] = torch.nan
    logits[1] = torch.nan
    logits[2, 4321] = torch.inf
    logits[3] = -torch.inf
    logits[4, :4999] = -torch.inf
    logits[5, 7] = -torch.inf
    logits[6, 0], logits[6, 4999] = torch.nan, 100.0
    tokens, finite, _ = run(logits, device)
    assert finite.tolist() == [0, 0, 0, 0, 1, 1, 0, 1]
    assert ((tokens >= 0) & (tokens < 5000)).all()
    assert tokens[2] == 4321 and tokens[4] == 4999
    assert tokens[7] == logits[7].argmax()
