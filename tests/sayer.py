"""Simulated engines that say what a test wants said, to prompts and to conversations."""

from collections.abc import Callable

import pytest

import aphoton.engine
from aphoton import SimModel
from aphoton.loader import Loaded
from aphoton.loader import load as load_any
from aphoton.text import ChatTemplate

__all__ = ["END_OF_PROMPT", "TEMPLATE", "let_sims_chat", "saying"]

EOS = 256
END_OF_PROMPT = "\x02"
"""Every prompt ends with it: what follows is the answer."""

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\x02"


def saying(
    text: str, *, end: bool = True, probe: Callable[[str], None] | None = None, max_model_len: int = 100_000
) -> SimModel:
    """A model that answers with ``text``, a byte a token, and then ends if ``end``, or begins again."""
    data = text.encode()

    def script(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
        mark = ord(END_OF_PROMPT)
        said = history[::-1].index(mark) if mark in history else len(history)
        return EOS if end and said >= len(data) else data[said % len(data)]

    return SimModel(script=script, vocab_size=300, eos_token_ids=(EOS,), probe=probe, max_model_len=max_model_len)


def let_sims_chat(patch: pytest.MonkeyPatch, template: str = TEMPLATE) -> None:
    """Give simulated models a chat template."""

    def load(*arguments: object) -> Loaded:
        loaded = load_any(*arguments)  # type: ignore[arg-type]
        template_of = loaded.chat_template or ChatTemplate(template)
        return Loaded(device=loaded.device, tokenizer=loaded.tokenizer, chat_template=template_of)

    patch.setattr(aphoton.engine, "load", load)
