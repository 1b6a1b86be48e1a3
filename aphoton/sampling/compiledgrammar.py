"""`CompiledGrammar`: a grammar, ready for a vocabulary."""

from collections.abc import Iterable

from llguidance import LLMatcher

from aphoton.sampling.grammarmasker import GrammarMasker
from aphoton.sampling.grammarvocabulary import GrammarVocabulary

__all__ = ["CompiledGrammar"]

USES = 1000


class CompiledGrammar:
    """Kept by `GrammarCompiler` for all sequences that have the same grammar.

    They share a lexer, which remembers what any of them has found out. That makes masks fast, but its limits are those
    of all together: it is replaced after `USES` sequences, and after one has reached them.

    :ivar field: the request's field that it came from.
    :ivar cost: seconds that a mask takes at the start, once what can be kept is kept.
    :ivar spent: to be compiled anew for the next request. Sequences that have a masker go on with it.
    """

    def __init__(self, field: str, matcher: LLMatcher, vocabulary: GrammarVocabulary, *, cost: float = 1.0) -> None:
        self.field = field
        self.cost = cost
        self.spent = False
        self._uses = 0
        self._matcher = matcher
        self._vocabulary = vocabulary

    def masker(self, *, min_tokens: int = 0, banned: Iterable[int] = ()) -> GrammarMasker:
        """The state of a new sequence: a copy, which takes some 10 us.

        :param min_tokens, banned: these ids (the end tokens, for one) may not come among the first ``min_tokens``, but
            where nothing else may. For a sequence with a grammar this stands for `RowSampling.min_tokens`, which knows
            no exception: where the text is complete before, the end is all that is left.
        """
        self._uses += 1
        if self._uses >= USES:
            self.spent = True
        return GrammarMasker(
            self._matcher.deep_copy(),
            self._vocabulary,
            field=self.field,
            cost=self.cost,
            min_tokens=min_tokens,
            banned=banned,
            on_error=self._spend,
        )

    def _spend(self) -> None:
        self.spent = True
