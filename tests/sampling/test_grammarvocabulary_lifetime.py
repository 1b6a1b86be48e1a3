"""What llguidance holds is let go."""

import gc
import weakref

import numpy as np
from sampling.grammars import compiled

from aphoton.sampling import GrammarCompiler, GrammarVocabulary


class Encoder:
    """What a tokenizer is to the vocabulary."""

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def test_a_vocabulary_lets_its_tokenizer_go() -> None:
    """llguidance and what it calls hold each other, which the garbage collector cannot see; and a program that has
    frozen its heap has none.
    """
    encoder = Encoder()
    held = weakref.ref(encoder)
    vocabulary = GrammarVocabulary(
        [bytes([i]) for i in range(256)] + [b""], eos_ids=(256,), vocab_size=257, encode=encoder
    )
    compiler = GrammarCompiler(vocabulary)
    masker = compiled(compiler, choices=("yes",)).masker()
    masker.fill(np.empty(vocabulary.words, np.uint32))
    gc.disable()
    try:
        del encoder, vocabulary, compiler, masker
        assert held() is None
    finally:
        gc.enable()
