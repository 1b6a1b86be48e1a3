"""`GrammarMasker`: the tokens that a grammar allows next."""

import time
from collections.abc import Callable, Iterable

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from aphoton.errors import ConstraintFailed
from aphoton.sampling.grammarvocabulary import GrammarVocabulary

__all__ = ["GrammarMasker", "clock"]

clock = time.thread_time if time.get_clock_info("thread_time").resolution <= 1e-6 else time.perf_counter
"""The processor's time of this thread, where the clock is fine enough: on a busy machine the other would call every
grammar slow now and then."""


class GrammarMasker:
    """A `Masker`: the state of one sequence. Made by `CompiledGrammar.masker`; it lives as long as its sequence, so
    that preemption does not touch it, and the same tokens lead another one to the same state.

    A request's ``ignore_eos`` changes nothing here: an end token that the grammar allows ends the sequence.

    :ivar cost: seconds that a mask takes: the last ones' mean, and at once the last one's when that took longer.
    :ivar matcher: llguidance's state.
    :ivar inside: the model's bits of a mask's last word: llguidance has a token more, and a grammar may name it.
    """

    __slots__ = (
        "_count",
        "_eos",
        "_field",
        "_kept",
        "_min_tokens",
        "_narrowed",
        "_on_error",
        "_vocabulary",
        "cost",
        "inside",
        "matcher",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: GrammarVocabulary,
        *,
        field: str,
        cost: float = 1.0,
        min_tokens: int = 0,
        banned: Iterable[int] = (),
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        self.matcher = matcher
        self.cost = cost
        self._field = field
        self._on_error = on_error
        self._vocabulary = vocabulary
        self._eos = frozenset(vocabulary.eos_ids)
        self.inside = np.uint32((1 << vocabulary.vocab_size % 32) - 1)
        self._count = 0
        self._min_tokens = min_tokens
        self._kept: NDArray[np.uint32] | None = None
        if min_tokens:
            self._kept = np.full(vocabulary.words, 0xFFFFFFFF, np.uint32)
            for i in banned:
                self._kept[i // 32] &= ~np.uint32(1 << i % 32)
            self._narrowed = np.empty_like(self._kept)

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self.matcher.is_accepting()

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """See `Masker.fill`.

        :raises ConstraintFailed: when the grammar needs more than a mask may cost.
        """
        began = clock()
        self._compute(mask)
        self.learn(clock() - began)
        mask[-1] &= self.inside
        self.finish(mask)

    def finish(self, mask: NDArray[np.uint32]) -> None:
        """The other part of `fill`, when the mask has been computed, here or by `fill_quick` and `fill_all`, and has no
        bits but those ``inside``."""
        # An error leaves a mask with the end token only.
        if self.matcher.is_error():
            self._on_error()
            reason = self.matcher.get_error().replace("<non-verbose/>", "").strip()
            if reason == "NoExtensionBias":  # whatever comes, no text is ever complete
                raise ConstraintFailed(self._field, f"allows no text{' that begins so' if self._count else ''}")
            raise ConstraintFailed(self._field, f"no mask can be made any more: {reason:.2000}")
        if self._kept is not None and self._count < self._min_tokens:
            np.bitwise_and(mask, self._kept, out=self._narrowed)
            if self._narrowed.any():
                mask[:] = self._narrowed

    def learn(self, took: float) -> None:
        """A mask took so many seconds."""
        self.cost = took if took > self.cost else 0.8 * self.cost + 0.2 * took

    def _compute(self, mask: NDArray[np.uint32]) -> None:
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> bool:
        """See `Masker.accept`. True at once when nothing can follow, without a step for the end token.

        Raises nothing: where the grammar cannot take the token, or would need more than it may cost, the next `fill`
        says so.
        """
        self._count += 1
        if not self.matcher.consume_token(token):
            return False
        if token in self._eos or self.matcher.is_stopped():
            return True
        if not self._eos and self.matcher.is_accepting():
            # No end token can be sampled: where it alone is left, which llguidance may see only now, this is the end.
            mask = np.empty(self._vocabulary.words, np.uint32)
            self._compute(mask)
            mask[-1] &= self.inside
            return not mask.any()
        return False
