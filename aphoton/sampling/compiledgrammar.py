"""`CompiledGrammar`: a grammar, ready for a vocabulary."""

from collections.abc import Iterable

from llguidance import LLMatcher

from aphoton.sampling.grammarmasker import GrammarMasker
from aphoton.sampling.grammarvocabulary import GrammarVocabulary

__all__ = ["CompiledGrammar"]


class CompiledGrammar:
    """Kept by `GrammarCompiler` for all sequences that have the same grammar.

    :ivar field: the request's field that it came from.
    :ivar cost: seconds that its first mask takes, once what can be kept is kept.
    """

    def __init__(self, field: str, matcher: LLMatcher, vocabulary: GrammarVocabulary, *, cost: float = 1.0) -> None:
        self.field = field
        self.cost = cost
        self._matcher = matcher
        self._vocabulary = vocabulary

    def masker(self, *, min_tokens: int = 0, banned: Iterable[int] = ()) -> GrammarMasker:
        """The state of a new sequence: a copy, which takes some 10 us.

        :param min_tokens, banned: these ids (the end tokens, for one) may not come among the first ``min_tokens``, but
            where nothing else may. For a sequence with a grammar this stands for `RowSampling.min_tokens`, which knows
            no exception: where the text is complete before, the end is all that is left.
        """
        return GrammarMasker(
            self._matcher.deep_copy(),
            self._vocabulary,
            field=self.field,
            cost=self.cost,
            min_tokens=min_tokens,
            banned=banned,
        )
