"""`Rules`: what may be sampled for a request, compiled from its parameters."""

from dataclasses import dataclass

from aphoton.errors import InvalidRequest
from aphoton.sampling import Masker, SamplingParams
from aphoton.sampling.tokenrules import TokenRules
from aphoton.text import Tokenizer

__all__ = ["Rules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Made once for a request, off the loop where that takes long; each of its sequences has a masker of its own.

    :ivar banned: ids that must never come, which a bias says to the device; the masker says it, too, if there is one.
    :ivar words: runs of ids that must not be completed, those of one id included.
    :ivar allowed: the only ids that may come; None: all.
    """

    vocab_size: int
    banned: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    allowed: tuple[int, ...] | None

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> "Rules":
        """:raises InvalidRequest: for bad words that leave nothing."""
        words = {run for word in params.bad_words for run in _runs(word, tokenizer, vocab_size)}
        allowed = None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
        banned = tuple(sorted(run[0] for run in words if len(run) == 1))
        if len(banned) == vocab_size or (allowed is not None and set(banned).issuperset(allowed)):
            raise InvalidRequest("bad_words", "leave no token that may come")
        return cls(vocab_size=vocab_size, banned=banned, words=tuple(words), allowed=allowed)

    def masker(self) -> Masker | None:
        """For a sequence that begins. None: ``banned`` says it all."""
        if len(self.banned) == len(self.words):
            return None
        return TokenRules(self.vocab_size, allowed=self.allowed, forbidden=self.words)


def _runs(word: str, tokenizer: Tokenizer, vocab_size: int) -> set[tuple[int, ...]]:
    """A word as tokens: as it is, in the midst of a word, and at the beginning of one.

    Ids that the model does not have cannot come.
    """
    bare = word.lstrip(" ")
    forms = {word, bare, f" {bare}"} if bare else {word}
    runs = (tuple(tokenizer.encode(form, add_special_tokens=False, parse_special=False)) for form in forms)
    return {run for run in runs if run and max(run) < vocab_size}
