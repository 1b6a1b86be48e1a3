"""A vocabulary of bytes, and a random model that keeps to a masker."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aphoton.sampling import CompiledGrammar, Grammar, GrammarCompiler, GrammarVocabulary, Masker, mask_words

EOS = 299
VOCAB = 333  # not a multiple of 32; 34 ids that no tokenizer knows


def byte_vocabulary(*, eos_ids: tuple[int, ...] = (EOS,)) -> GrammarVocabulary:
    pieces = [bytes([i]) for i in range(256)] + [f"<{i}>".encode() for i in range(256, 300)]
    return GrammarVocabulary(
        pieces, special_ids=range(256, 300), eos_ids=eos_ids, vocab_size=VOCAB, encode=lambda text: list(text.encode())
    )


def bits(mask: NDArray[np.uint32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def mask_of(masker: Masker, vocab_size: int = VOCAB) -> set[int]:
    mask = np.full(mask_words(vocab_size), 0xA5A5A5A5, np.uint32)  # what is in it means nothing
    masker.fill(mask)
    return bits(mask)


def compiled(compiler: GrammarCompiler, **fields: object) -> CompiledGrammar:
    grammar = Grammar.of(**fields)  # type: ignore[arg-type]
    assert grammar is not None
    return compiler.compile_here(grammar)


class RandomModel:
    """Random logits. After ``patience`` tokens it prefers what ends: it would write endless strings otherwise."""

    def __init__(self, seed: int, pieces: list[bytes], *, patience: int = 60) -> None:
        self.random = np.random.default_rng(seed)
        self.ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
        self.patience = patience

    def pick(self, allowed: set[int], count: int, eos: set[int]) -> int:
        if count > self.patience and self.random.random() < 0.9:
            if eos & allowed:
                return min(eos & allowed)
            inside_string = all(self.ids[letter] in allowed for letter in (b"j", b"q", b"z"))
            for closing in (b'"',) if inside_string else (b"}", b"]", b",", b":", b'"', b"0"):
                if self.ids[closing] in allowed:
                    return self.ids[closing]
        return int(self.random.choice(sorted(allowed)))

    def generate(
        self,
        masker: Masker,
        vocab_size: int,
        eos: tuple[int, ...],
        *,
        limit: int = 3000,
        check: Callable[[], None] = int,
    ) -> list[int] | None:
        """Tokens until the end, that of the end token not among them; None when the limit came first."""
        output: list[int] = []
        while len(output) < limit:
            token = self.pick(mask_of(masker, vocab_size), len(output), set(eos))
            ended = masker.accept(token)
            if token in eos:
                assert ended
            else:
                output.append(token)
            if ended:
                return output
        return None
