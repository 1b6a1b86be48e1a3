"""Words that must not come, ids that may, and both with a grammar."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling.grammars import EOS, VOCAB, byte_vocabulary, compiled, mask_of

from aphoton.errors import ConstraintFailed
from aphoton.sampling import AllowedTokens, BadWords, GrammarCompiler, Rules
from aphoton.sampling.masks import QUICK

ALL = set(range(VOCAB))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 333])
def test_masks_end_with_the_vocabulary(vocab_size: int) -> None:
    assert mask_of(BadWords([], vocab_size), vocab_size) == set(range(vocab_size))
    assert mask_of(AllowedTokens([0, vocab_size - 1], vocab_size), vocab_size) == {0, vocab_size - 1}


def test_a_word_is_stopped_at_its_last_token() -> None:
    words = BadWords([[1, 2, 3], [7], [2, 4], [332]], VOCAB)
    assert mask_of(words) == ALL - {7, 332}
    assert not words.accept(1)
    assert mask_of(words) == ALL - {7, 332}
    assert not words.accept(2)
    assert mask_of(words) == ALL - {7, 332, 3, 4}
    assert not words.accept(2)
    assert mask_of(words) == ALL - {7, 332, 4}
    assert not words.accept(5)
    assert mask_of(words) == ALL - {7, 332}


def test_a_word_that_overlaps_itself() -> None:
    words = BadWords([[1, 1, 1]], VOCAB)
    words.accept(1)
    assert 1 in mask_of(words)
    words.accept(1)
    assert 1 not in mask_of(words)


def test_sequences_share_what_was_made_of_the_words() -> None:
    words = BadWords([[1, 2, 3], [7]], VOCAB)
    one, other = words.begin(), words.begin()
    for token in (1, 2):
        one.accept(token)
    assert (mask_of(one), mask_of(other)) == (ALL - {7, 3}, ALL - {7})
    assert one._by_last is other._by_last


def test_words_that_take_long_are_not_for_the_loop() -> None:
    assert BadWords([[1] * 500 + [2]], VOCAB).cost < QUICK
    assert BadWords([[1] * (500 + i) for i in range(100)], VOCAB).cost > QUICK


@given(
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=5),
    seed=st.integers(0, 1000),
)
def test_bad_words_never_come_and_all_else_may(words: list[list[int]], seed: int) -> None:
    masker = BadWords(words, 5)
    output: list[int] = []
    for _ in range(40):
        expected = {t for t in range(5) if not any([*output, t][-len(word) :] == word for word in words)}
        assert mask_of(masker, 5) == expected
        if not expected:
            break
        output.append(random.Random(seed + len(output)).choice(sorted(expected)))
        assert not masker.accept(output[-1])


def test_allowed_tokens_stay_the_same() -> None:
    masker = AllowedTokens([3, 40, 300], VOCAB)
    assert mask_of(masker) == {3, 40, 300}
    assert not masker.accept(3)
    assert mask_of(masker) == {3, 40, 300}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary())


def rules(compiler: GrammarCompiler, *others: Any) -> Rules:
    names = ["regex", *("bad_words" if isinstance(other, BadWords) else "allowed_token_ids" for other in others)]
    return Rules([compiled(compiler, regex="[abc]+").masker(), *others], names)


def test_all_rules_hold_together(compiler: GrammarCompiler) -> None:
    masker = rules(compiler, BadWords([[97, 98], [99]], VOCAB), AllowedTokens([97, 98, 99, EOS], VOCAB))
    assert mask_of(masker) == {97, 98}
    assert not masker.accept(97)
    assert mask_of(masker) == {97, EOS}
    assert not masker.accept(97)
    assert masker.accept(EOS)


def test_the_end_of_one_is_the_end_and_all_have_gone_on(compiler: GrammarCompiler) -> None:
    words = BadWords([[97, 98]], VOCAB)
    masker = Rules([compiled(compiler, choices=["a"]).masker(), words], ["choices", "bad_words"])
    assert masker.accept(97)
    assert 98 not in mask_of(words)


def test_rules_that_leave_nothing_say_so(compiler: GrammarCompiler) -> None:
    masker = rules(compiler, AllowedTokens([100], VOCAB))
    with pytest.raises(
        ConstraintFailed, match="no token is left that regex and allowed_token_ids allow together"
    ) as no:
        mask_of(masker)
    assert no.value.field == "allowed_token_ids"


def test_rules_cost_what_all_do(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, regex="[abc]+").masker()
    grammar.cost = 1.0
    masker = Rules([grammar, BadWords([], VOCAB)], ["regex", "bad_words"])
    assert 1.0 < masker.cost < 1.1
    for _ in range(200):
        mask_of(masker)
    assert masker.cost < 0.1
