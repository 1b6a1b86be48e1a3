"""`GrammarCompiler`: grammars, ready for a model's vocabulary."""

import asyncio
import json
import os
import re
import threading

import anyio
import anyio.to_thread
import numpy as np
from llguidance import LLMatcher, LLParserLimits

from aphoton.errors import ConstraintFailed, InvalidRequest
from aphoton.sampling.compiledgrammar import CompiledGrammar
from aphoton.sampling.grammar import Grammar
from aphoton.sampling.grammarmasker import GrammarMasker
from aphoton.sampling.grammarvocabulary import GrammarVocabulary
from aphoton.sampling.intersections import check_intersections, check_lark_intersections

__all__ = ["GrammarCompiler"]

CACHED = 32
"""Compiled grammars to keep: those that were used last."""

THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Grammars that are compiled at once."""

PROBE = 3
"""Tokens by which a grammar is tried before it is used."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 14 ms for one mask
    step_max_items=20_000,  # 1 ms
    max_items_in_row=2_000,
    max_lexer_states=20_000,  # 40 MB
    max_grammar_size=100_000,
    verbose_errors=False,
)

JSON_OPTIONS = {
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarCompiler:
    """One per engine. Keeps what it compiled last. Safe to use from several threads at once."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiled: dict[tuple[str, str], CompiledGrammar] = {}
        self._compiling: dict[tuple[str, str], asyncio.Task[CompiledGrammar]] = {}
        self._limiter: anyio.CapacityLimiter | None = None  # of its own: the app's threads are the app's

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Off the loop, unless it is there already, and once for all who ask meanwhile. Takes about a millisecond; some
        seconds for the largest.

        The first one builds the vocabulary's tables: see `GrammarVocabulary.tokenizer`.

        :raises InvalidRequest: for a grammar that is not supported, wrong, too large, or that allows no text; it names
            the request's field.
        """
        known = self._known(grammar)
        if known is not None:
            return known
        key = (grammar.kind, grammar.text)
        task = self._compiling.get(key)
        if task is None or task.done():
            task = self._compiling[key] = asyncio.create_task(self._compile_off_loop(grammar))
            task.add_done_callback(_look)
        try:
            # Not worth waiting for when the caller is cancelled; the result is kept all the same.
            return await asyncio.shield(task)
        except InvalidRequest as error:
            raise InvalidRequest(error.field, error.reason) from None  # one of their own for all who asked

    async def _compile_off_loop(self, grammar: Grammar) -> CompiledGrammar:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(THREADS)
        try:
            return await anyio.to_thread.run_sync(
                self.compile_here, grammar, abandon_on_cancel=True, limiter=self._limiter
            )
        finally:
            del self._compiling[grammar.kind, grammar.text]

    def compile_here(self, grammar: Grammar) -> CompiledGrammar:
        """`compile`, in the calling thread."""
        known = self._known(grammar)
        if known is not None:
            return known
        compiled = self._compile(grammar)
        with self._lock:
            compiled = self._compiled.setdefault((grammar.kind, grammar.text), compiled)
            while len(self._compiled) > CACHED:
                del self._compiled[next(iter(self._compiled))]
        return compiled

    def _known(self, grammar: Grammar) -> CompiledGrammar | None:
        key = (grammar.kind, grammar.text)
        with self._lock:
            compiled = self._compiled.pop(key, None)
            if compiled is None or compiled.spent:
                return None
            self._compiled[key] = compiled  # the last used is the last
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        field = grammar.kind
        try:
            source = _source(grammar)
        except ValueError as error:  # numbers out of range, nesting that its JSON reader refuses
            raise InvalidRequest(field, f"cannot be read: {error}") from None
        try:
            if grammar.is_json:
                check_intersections(json.loads(grammar.text))
            elif grammar.kind == "grammar":
                check_lark_intersections(grammar.text)
        except ValueError as error:
            raise InvalidRequest(field, str(error)) from None
        except RecursionError:
            raise InvalidRequest(field, "is nested too deeply, or refers too far") from None
        matcher = LLMatcher(self.vocabulary.tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(field, _reason(matcher.get_error()))
        try:
            return self._tried(field, matcher)
        except ConstraintFailed as error:
            raise InvalidRequest(field, error.reason) from None

    def _tried(self, field: str, matcher: LLMatcher) -> CompiledGrammar:
        # The first mask takes several times as long as those after it: what it finds out is kept for all copies. And
        # some grammars turn out to allow nothing, or to be too large, only here, or a token or two later.
        first = GrammarMasker(matcher, self.vocabulary, field=field)
        mask = np.zeros(self.vocabulary.words, np.uint32)
        first.fill(mask)
        for end in self.vocabulary.eos_ids:
            mask[end // 32] &= ~np.uint32(1 << end % 32)
        if not mask.any():
            raise InvalidRequest(field, "allows no text but the empty one" if first.complete else "allows no text")
        probe = GrammarMasker(matcher.deep_copy(), self.vocabulary, field=field, cost=0.0)
        for _ in range(PROBE):
            probe.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed):  # a grammar may name tokens that the model does not have
                raise InvalidRequest(field, "allows no text")
            if probe.accept(int(allowed[0])):
                break
        return CompiledGrammar(field, matcher, self.vocabulary, cost=probe.cost)


def _look(task: asyncio.Task[CompiledGrammar]) -> None:
    """Whoever asked may be gone: an error is not to be reported as one that nobody has seen."""
    if not task.cancelled():
        task.exception()


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it."""
    if grammar.is_json:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choices":
        # One terminal: as alternatives of a rule they would be limited to 2,000.
        return LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(grammar.text))))
    return LLMatcher.grammar_from_lark(grammar.text)


def _literal(text: str) -> str:
    """A regular expression of one text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _reason(error: str) -> str:
    """llguidance's error as a request's author can use it."""
    error = error.replace("<non-verbose/>", "").strip()
    if keys := re.search(r"Unimplemented keys: (\[.*?\])", error):
        names = json.loads(keys[1])
        return (
            f"keyword {', '.join(names)} is not supported"
            if len(names) == 1
            else (f"keywords {', '.join(names)} are not supported")
        )
    if name := re.search(r"Unknown format: (.*)", error):
        return f"keyword format is not supported with the value {name[1]!r}"
    if name := re.search(r"Resource '(.*)' is not present in a registry", error):
        return f"names a schema that is not known, {name[1]!r:.200}: $schema may be one of JSON Schema's own drafts"
    if "coerce_one_of" in error:
        return (
            "keyword oneOf is not supported where its alternatives may overlap; anyOf is, and a required tag property"
        )
    return error[:2000] or "cannot be compiled"
