"""`Constraints`: what may be sampled for a request, token by token, compiled from its parameters."""

import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from aphoton.errors import InvalidRequest
from aphoton.offloop import in_thread, off_loop
from aphoton.sampling import (
    AllowedTokens,
    BadWords,
    CompiledGrammar,
    Grammar,
    GrammarCompiler,
    Masker,
    Rules,
    SamplingParams,
)
from aphoton.sampling.schema import Schema
from aphoton.text import Tokenizer

__all__ = ["Constraints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Made once for a request; each of its sequences has a masker of its own.

    :ivar grammar: what its outputs are; None: anything.
    :ivar banned: ids that must never come.
    :ivar masked: the host says, token by token, what may come. Else a bias says all, and the host does nothing.
    :ivar runs: of ids, that must not be completed, those of one id included; None where ``banned`` says it all.
    :ivar allowed: the only ids that may come, where the other two do not say it all.
    """

    grammar: Grammar | None
    compiled: CompiledGrammar | None
    banned: tuple[int, ...]
    masked: bool
    runs: BadWords | None
    allowed: AllowedTokens | None

    @classmethod
    async def of(
        cls, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, compiler: GrammarCompiler
    ) -> "Constraints":
        """Off the loop, where it takes long.

        :raises InvalidRequest: for a grammar that is not supported, or for words that leave nothing.
        """
        grammar = compiled = None
        if params.constrained:
            grammar = await off_loop(_size(params), partial(_grammar, params))
            compiled = await compiler.compile(grammar)
        words: set[tuple[int, ...]] = set()
        if params.bad_words:
            words = await in_thread(partial(_runs, params.bad_words, tokenizer, vocab_size))
        allowed = params.allowed_token_ids
        banned = tuple(sorted(run[0] for run in words if len(run) == 1))
        if len(banned) == vocab_size or (allowed is not None and set(banned).issuperset(allowed)):
            raise InvalidRequest("bad_words", "leave no token that may come")
        # A processor sees its logits behind the bias, and may undo it.
        masked = grammar is not None or len(words) > len(banned) or (bool(words) and params.processor is not None)
        runs = only = None
        if words and masked:
            runs = await in_thread(partial(BadWords, sorted(words), vocab_size))
        if allowed is not None and masked:  # the mask stands in its place
            known = allowed[: bisect_left(allowed, vocab_size)]  # with others it will be refused
            only = await in_thread(partial(AllowedTokens, known, vocab_size))
        return cls(grammar=grammar, compiled=compiled, banned=banned, masked=masked, runs=runs, allowed=only)

    def masker(self, *, min_tokens: int, ends: Iterable[int]) -> Masker | None:
        """For a sequence that begins; None unless ``masked``.

        :param min_tokens: tokens before ``ends`` may come, where there is a grammar: it knows when nothing else may.
        """
        if not self.masked:
            return None
        maskers: list[Masker] = []
        names: list[str] = []
        if self.compiled is not None:
            maskers.append(self.compiled.masker(min_tokens=min_tokens, banned=ends))
            names.append(self.compiled.field)
        if self.runs is not None:
            maskers.append(self.runs.begin())
            names.append("bad_words")
        if self.allowed is not None:
            maskers.append(self.allowed)
            names.append("allowed_token_ids")
        return Rules(maskers, names) if len(maskers) > 1 else maskers[0]


def _size(params: SamplingParams) -> int:
    """Characters that a grammar is made from."""
    schema = params.json_schema
    if schema is not None:
        # From a type it is made by code of the app's, which may take what time it likes.
        return len(schema.text) if isinstance(schema, Schema) else sys.maxsize
    texts = (params.regex, params.grammar, *(params.choices or ()))
    return sum(len(text) for text in texts if isinstance(text, str))


def _grammar(params: SamplingParams) -> Grammar:
    grammar = Grammar.of(
        json_schema=params.json_schema,
        json_object=params.json_object,
        regex=params.regex,
        choices=None if params.choices is None else tuple(params.choices),
        grammar=params.grammar,
    )
    assert grammar is not None
    return grammar


def _runs(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> set[tuple[int, ...]]:
    """Words as tokens: as they are, in the midst of a word, and at the beginning of one.

    Ids that the model does not have cannot come.
    """
    runs = set()
    for word in words:
        bare = word.lstrip(" ")
        for form in {word, bare, f" {bare}"} if bare else {word}:
            runs.add(tuple(tokenizer.encode(form, add_special_tokens=False, parse_special=False)))
    return {run for run in runs if run and max(run) < vocab_size}
