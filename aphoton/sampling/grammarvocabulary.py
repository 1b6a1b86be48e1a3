"""`GrammarVocabulary`: a model's tokens, as grammars see them."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from llguidance import LLTokenizer

from aphoton.checks import check_int, check_ints
from aphoton.sampling.masker import mask_words

__all__ = ["GrammarVocabulary"]

FORCED = 1024
"""Forced texts whose tokens are kept: sequences of one grammar force the same ones, and some tokenizers take longer for
a text than its mask does."""

FORCED_LENGTH = 64
"""Characters of the longest of them."""


class GrammarVocabulary:
    """The bytes of every token id, in the form in which masks are computed. Safe to use from several threads at once.

    :param pieces: bytes of each id that the tokenizer knows; of special tokens any, for they are no text.
    :param special_ids: ids that are no text: a grammar allows none of them but the end tokens, and those that a Lark
        grammar names (``<|im_end|>``).
    :param eos_ids: the model's own end tokens: allowed where the text may end. There may be none: then a text ends only
        where nothing may follow it.
    :param vocab_size: of the model, which may be larger than the tokenizer's; ids beyond the tokenizer's are never
        allowed.
    :param encode: the ids of a text, without special tokens. Where a grammar leaves one text only, its tokens are
        forced to be those that the model has seen in training. None: the longest tokens that fit.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        special_ids: Iterable[int] = (),
        eos_ids: Sequence[int] = (),
        vocab_size: int,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        check_int("vocab_size", vocab_size, 1)
        self.vocab_size = vocab_size
        self.eos_ids = check_ints("eos_ids", eos_ids, 0, vocab_size - 1)
        self.words = mask_words(vocab_size)
        """uint32 words in a mask."""
        self._pieces = pieces
        self._special = frozenset(special_ids)
        self._encode = encode
        self._plain: LLTokenizer | None = None
        self._built: LLTokenizer | None = None
        self._lock = threading.Lock()

    def greedy(self, text: str) -> list[int]:
        """The longest tokens that fit."""
        return [] if self._plain is None else self._plain.greedy_tokenize(text)

    def build(self) -> None:
        """Build `tokenizer` now."""
        assert self.tokenizer is not None

    @property
    def tokenizer(self) -> LLTokenizer:
        """Built once, when it is first asked for: 0.2 s for 50,000 tokens, up to 0.9 s for 128,000.

        llguidance holds the interpreter's lock while it builds, in two parts of about half the time each: in whichever
        thread it happens, nothing else runs meanwhile.
        """
        if self._built is None:
            with self._lock:
                if self._built is None:
                    source = _Source(
                        self._pieces, self._special, self.eos_ids, self.vocab_size, self._encode, self.greedy
                    )
                    self._plain = LLTokenizer(source, eos_token=source.eos_ids, slices=[])  # type: ignore[arg-type]
                    # Masks of JSON strings take a millisecond without these.
                    self._built = self._plain.with_slices(LLTokenizer.json_slices())
        return self._built


class _Source:
    """What llguidance reads a vocabulary from, and asks for the tokens of a forced text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        pieces: Sequence[bytes],
        special: frozenset[int],
        eos_ids: tuple[int, ...],
        vocab_size: int,
        encode: Callable[[str], list[int]] | None,
        greedy: Callable[[str], list[int]],
    ) -> None:
        tokens = list(pieces[:vocab_size])
        tokens += [b""] * (vocab_size - len(tokens))
        # One behind all others, so that a mask has `mask_words`. llguidance needs an end token: this is it where the
        # model has none, and its bit is in no mask (`GrammarMasker.inside`).
        tokens.append(b"")
        eos_ids = eos_ids or (vocab_size,)
        for i in eos_ids:
            tokens[i] = tokens[i] or b"<end>"
        self.tokens = tokens
        self.eos_ids = list(eos_ids)
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted({i for i in special if i < vocab_size} | set(eos_ids))
        self._encode = encode
        self._size = vocab_size
        # Not of a method of this object's: the two would hold each other.
        self._known = None if encode is None else lru_cache(FORCED)(encode)
        # llguidance holds this object, and Python's garbage collector cannot see that: it must not hold llguidance's.
        self._greedy = weakref.WeakMethod(greedy)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        if self._encode is not None and self._known is not None:
            ids = self._known(text) if len(text) <= FORCED_LENGTH else self._encode(text)
            # Some tokenizers put a space in front of a text, or change its characters: those tokens are another text's.
            if all(i < self._size for i in ids) and b"".join([self.tokens[i] for i in ids]) == text.encode():
                return ids
        greedy = self._greedy()
        return [] if greedy is None else greedy(text)
