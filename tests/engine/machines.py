"""Engines on the real CPU device, with a model that a test has made."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import aphoton.engine
from aphoton import Engine
from aphoton.attention import KVCache
from aphoton.device.base import Limits
from aphoton.device.cpu import CpuDevice, Model
from aphoton.loader import Loaded
from aphoton.models import StepInput
from aphoton.text import ByteTokenizer, ChatTemplate, Tokenizer

VOCAB = 300


@dataclass
class Counting:
    """A model that counts: behind token t comes t + 1.

    :ivar poison: a token behind which the logits are no numbers.
    :ivar value: what stands there instead.
    :ivar fail: a token that the model fails at.
    :ivar hold: each step waits for it.
    :ivar steps: rows of each step so far.
    """

    poison: int | None = None
    value: float = float("nan")
    fail: int | None = None
    hold: threading.Event | None = None
    steps: list[int] = field(default_factory=list)

    def forward(self, step: StepInput, kv: KVCache) -> Tensor:
        self.steps.append(len(step.starts))
        if self.hold is not None:
            assert self.hold.wait(60)
        last = step.tokens[step.lengths.cumsum(0) - 1]
        if self.fail is not None and (step.tokens == self.fail).any():
            raise OSError("the device is on fire")
        logits = torch.zeros(len(last), VOCAB)
        logits[torch.arange(len(last)), (last + 1) % VOCAB] = 10.0
        if self.poison is not None:
            logits[last == self.poison] = self.value
        return logits


class Gate(ByteTokenizer):
    """Tokenizes a long text when it is told to."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.go = threading.Event()
        self.entered = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        self.entered.set()
        assert self.go.wait(60), "the loop was blocked"
        return [2, 7]


def machine(
    patch: pytest.MonkeyPatch,
    model: Model,
    *,
    tokenizer: Tokenizer | None = None,
    template: str | None = None,
    max_rows: int = 8,
    **settings: object,
) -> Engine:
    """An engine that runs ``model``; its end token is 299."""

    def load(*_: object) -> Loaded:
        kv = KVCache(layers=1, pages=100, page_size=16, kv_heads=1, head_dim=2, dtype=torch.float32)
        limits = Limits(vocab_size=VOCAB, max_model_len=400, pages=100, eos_token_ids=(VOCAB - 1,))
        return Loaded(
            device=CpuDevice(model, kv, limits, max_rows=max_rows),
            tokenizer=tokenizer or ByteTokenizer(VOCAB),
            chat_template=None if template is None else ChatTemplate(template),
        )

    patch.setattr(aphoton.engine, "load", load)
    return Engine("made by the test", max_rows=max_rows, **settings)
