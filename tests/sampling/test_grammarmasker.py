"""Grammars compiled, and what their maskers allow."""

import asyncio
import dataclasses
import datetime
import decimal
import json
import re
import threading
import typing
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import gguf
import msgspec
import numpy as np
import pydantic
import pytest
from llguidance import LLTokenizer
from sampling.grammars import EOS, VOCAB, RandomModel, bits, byte_vocabulary, compiled, mask_of

import aphoton.sampling.masks
from aphoton.errors import ConstraintFailed, InvalidRequest
from aphoton.sampling import (
    CompiledGrammar,
    Grammar,
    GrammarCompiler,
    GrammarMasker,
    GrammarVocabulary,
    Masker,
    Rules,
    fill_all,
    fill_quick,
    mask_words,
)
from aphoton.sampling.masks import QUICK
from aphoton.text import Tokenizer

BYTES = [bytes([i]) for i in range(256)]

FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "at": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary())


@pytest.fixture(scope="module")
def endless() -> GrammarCompiler:
    """Of a model without an end token."""
    return GrammarCompiler(byte_vocabulary(eos_ids=()))


def generate(masker: GrammarMasker, text: bytes) -> None:
    for byte in text:
        mask_of(masker)
        masker.accept(byte)


def follow(masker: GrammarMasker, text: bytes) -> list[bool]:
    """What `accept` says to each byte, each of which the mask must allow."""
    ends = []
    for byte in text:
        assert byte in mask_of(masker), (text, chr(byte))
        ends.append(masker.accept(byte))
    return ends


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[a-z]{2,5}-[0-9]+"}, "[a-z]{2,5}-[0-9]+"),
        ({"regex": "(a/b|\n\"'|\\\\d)日?"}, "(a/b|\n\"'|\\\\d)日?"),
        ({"choices": ["yes", "yes please", "no/never", '"q"\n', "日本", "a|b", "\\d"]}, None),
        ({"grammar": 'start: "<" (word ",")* word ">"\nword: /[a-c]+/'}, "<([a-c]+,)*[a-c]+>"),
    ],
    ids=["regex", "escapes", "choices", "lark"],
)
def test_random_texts_keep_to_the_grammar(compiler: GrammarCompiler, fields: dict[str, Any], pattern: str) -> None:
    ready = compiled(compiler, **fields)
    seen = set()
    for seed in range(30):
        output = RandomModel(seed, BYTES).generate(ready.masker(), VOCAB, (EOS,))
        assert output is not None
        text = bytes(output).decode()
        assert text in fields["choices"] if pattern is None else re.fullmatch(pattern, text)
        seen.add(text)
    assert len(seen) > 3


def random_objects(compiler: GrammarCompiler, kind: Any) -> Iterator[Any]:
    """Of 20 random texts that the type's schema allows."""
    grammar = Grammar.of(json_schema=kind)
    assert grammar is not None
    ready = compiler.compile_here(grammar)
    for seed in range(20):
        output = RandomModel(seed, BYTES).generate(ready.masker(), VOCAB, (EOS,))
        assert output is not None
        yield grammar.parse(bytes(output).decode())


def test_random_json_is_valid(compiler: GrammarCompiler) -> None:
    class Form(msgspec.Struct):
        name: str
        sizes: list[float]
        inner: dict[str, int | None]

    assert all(isinstance(made, Form) for made in random_objects(compiler, Form))
    assert all(list(made) == list(FORM["properties"]) for made in random_objects(compiler, FORM))
    objects = compiled(compiler, json_object=True)
    for seed in range(20):
        output = RandomModel(seed, BYTES).generate(objects.masker(), VOCAB, (EOS,))
        assert output is not None and isinstance(json.loads(bytes(output)), dict)


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    others: list[Cat | Dog] = []
    address: tuple[int, str]


class Leaf(msgspec.Struct, tag=True):
    value: Annotated[int, msgspec.Meta(ge=-5, lt=5)]


class Node(msgspec.Struct, tag=True):
    left: "Node | Leaf"
    colours: set[Literal["red", "green"]] = msgspec.field(default_factory=set)


Moment = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
Clock = Annotated[datetime.time, msgspec.Meta(tz=True)]


class Dates(pydantic.BaseModel):
    day: datetime.date
    moment: datetime.datetime
    clock: datetime.time
    span: datetime.timedelta


@pytest.mark.parametrize(
    "kind",
    [
        *(Owner, Node | Leaf, dict[str, list[bool]], uuid.UUID, decimal.Decimal, bytes),
        *(Dates, datetime.date, Moment, Clock, datetime.timedelta),
    ],
)
def test_random_texts_become_objects_of_a_type(compiler: GrammarCompiler, kind: Any) -> None:
    for made in random_objects(compiler, kind):
        plain = typing.get_args(kind)[0] if kind in (Moment, Clock) else kind
        assert isinstance(made, dict if kind == dict[str, list[bool]] else plain)


NaiveMoment = Annotated[datetime.datetime, msgspec.Meta(tz=False)]
NaiveClock = Annotated[datetime.time, msgspec.Meta(tz=False)]


@dataclasses.dataclass
class Visit:
    at: datetime.datetime
    until: Annotated[datetime.time | None, msgspec.Meta(description="If known.")] = None


class Shift(typing.NamedTuple):
    start: datetime.datetime
    end: NaiveClock
    note: str | None = None


class Plan(typing.TypedDict):
    visits: list[Visit]
    clock: typing.NotRequired[datetime.time]


class Opened(msgspec.Struct, tag=True, rename="camel"):
    opened_at: datetime.datetime
    clocks: tuple[datetime.time, int, NaiveMoment]


class Closed(msgspec.Struct, tag=True, array_like=True):
    closed_at: datetime.datetime
    clock: NaiveClock | int


class Renamed(msgspec.Struct, tag=True):
    previous: "Renamed | Opened | None"
    at: datetime.datetime | None
    spans: dict[str, datetime.datetime | list[datetime.time] | dict[str, NaiveMoment]]


@pytest.mark.parametrize(
    "kind",
    [
        *(datetime.datetime, datetime.time, NaiveMoment, NaiveClock, datetime.datetime | None),
        *(list[datetime.datetime], set[datetime.time], tuple[datetime.time, ...], dict[str, datetime.datetime]),
        *(Visit, Shift, Plan, Opened, Closed, Renamed, Opened | Renamed, Opened | Renamed | datetime.time | None),
    ],
    ids=str,
)
def test_random_moments_with_and_without_offset(compiler: GrammarCompiler, kind: Any) -> None:
    assert len(list(random_objects(compiler, kind))) == 20


@pytest.mark.parametrize("day", ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "2023-02-28", "1999-11-30"])
def test_real_days_may_come(compiler: GrammarCompiler, day: str) -> None:
    assert follow(compiled(compiler, json_schema=datetime.date).masker(), f'"{day}"'.encode())[-1]


@pytest.mark.parametrize("day", ["2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01", "2023-00-10"])
def test_other_days_may_not(compiler: GrammarCompiler, day: str) -> None:
    masker = compiled(compiler, json_schema=datetime.date).masker()
    assert not all(byte in mask_of(masker) and not masker.accept(byte) for byte in f'"{day}'.encode())


def test_json_has_no_endless_space(compiler: GrammarCompiler) -> None:
    masker = compiled(compiler, json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}).masker()
    assert mask_of(masker) == {ord("{")}
    follow(masker, b'{"a": 1')
    assert ord(" ") not in mask_of(masker)
    follow(masker, b", ")
    assert mask_of(masker) == {ord('"')}


def test_the_end(compiler: GrammarCompiler) -> None:
    """At once where nothing can follow; with the end token where something could."""
    ready = compiled(compiler, choices=["yes", "yes please"])
    masker = ready.masker()
    assert follow(masker, b"ye") == [False, False] and not masker.complete
    assert follow(masker, b"s") == [False] and masker.complete
    assert mask_of(masker) == {ord(" "), EOS}
    assert follow(masker, b" please") == [False] * 6 + [True] and masker.complete

    masker = ready.masker()
    follow(masker, b"yes")
    assert masker.accept(EOS)


def test_every_end_token_of_the_model() -> None:
    compiler = GrammarCompiler(byte_vocabulary(eos_ids=(EOS, 5, 270)))
    masker = compiled(compiler, regex="a+").masker()
    follow(masker, b"a")
    assert mask_of(masker) == {ord("a"), EOS, 5, 270}
    assert masker.accept(270)


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    """Neither those nor the ids that only the model has: `.` is any character, but no token's name."""
    masker = compiled(compiler, regex="(.|\n)*").masker()
    allowed = mask_of(masker)
    assert EOS in allowed and allowed - {EOS} <= set(range(256)) and set(range(128)) <= allowed


def test_a_model_without_end_token(endless: GrammarCompiler) -> None:
    masker = compiled(endless, choices=["yes", "yes please"]).masker()
    follow(masker, b"yes")
    assert mask_of(masker) == {ord(" ")} and masker.complete
    assert follow(masker, b" please")[-1]
    masker = compiled(endless, regex="a{2}").masker()
    assert follow(masker, b"aa") == [False, True]
    # The lexer sees only with the next mask that no `b` can come.
    masker = compiled(endless, grammar="start: A B?\nA: /a+/\nB: /b/ & /c/").masker()
    assert ord("b") not in (follow(masker, b"a") and mask_of(masker))


def test_words_beyond_the_vocabulary_stay_clear() -> None:
    """A vocabulary of whole words has no place for llguidance's own end token."""
    vocabulary = GrammarVocabulary(BYTES, vocab_size=256)
    masker = compiled(GrammarCompiler(vocabulary), regex="a+").masker()
    assert mask_of(masker, 256) == {ord("a")}
    assert not masker.accept(ord("a"))
    assert mask_of(masker, 256) == {ord("a")}


def test_fewer_than_min_tokens_end_only_where_they_must(compiler: GrammarCompiler) -> None:
    ready = compiled(compiler, regex="a{1,9}")
    masker = ready.masker(min_tokens=3, banned=(EOS,))
    for count in range(5):
        assert (EOS in mask_of(masker)) == (count >= 3)
        assert not masker.accept(ord("a"))
    short = compiled(compiler, regex="a|ab").masker(min_tokens=5, banned=(EOS, ord("b")))
    follow(short, b"a")
    assert mask_of(short) == {ord("b"), EOS}  # nothing else may come


def test_replay_leads_to_the_same_masks(compiler: GrammarCompiler) -> None:
    ready = compiled(compiler, json_schema=FORM)
    first = ready.masker()
    model = RandomModel(3, BYTES)
    output: list[int] = []
    ended = False
    while not ended:
        again = ready.masker()
        for token in output:
            assert not again.accept(token)  # without a mask between them
        allowed = mask_of(first)
        assert mask_of(again) == allowed
        output.append(model.pick(allowed, len(output), {EOS}))
        ended = first.accept(output[-1])
    assert len(output) > 40


def test_sequences_of_one_grammar_are_apart(compiler: GrammarCompiler) -> None:
    ready = compiled(compiler, choices=["ab", "cd"])
    one, two = ready.masker(), ready.masker()
    follow(one, b"a")
    assert mask_of(two) == {ord("a"), ord("c")}
    follow(two, b"c")
    assert (mask_of(one), mask_of(two)) == ({ord("b")}, {ord("d")})


def test_a_token_that_is_not_allowed_is_an_error_at_the_next_mask(compiler: GrammarCompiler) -> None:
    masker = compiled(compiler, regex="abc").masker()
    assert not masker.accept(ord("z"))
    with pytest.raises(ConstraintFailed, match="regex: no mask can be made any more"):
        mask_of(masker)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"json_schema": {"not": {}}}, "keyword not is not supported"),
        ({"json_schema": {"if": {}, "then": {}}}, "keywords if, then are not supported"),
        ({"json_schema": {"items": {"type": "array", "uniqueItems": True}}}, "keyword uniqueItems is not supported"),
        ({"json_schema": {"type": "string", "format": "zip"}}, "keyword format is not supported with the value 'zip'"),
        ({"json_schema": {"oneOf": [{"type": "string"}, {"minLength": 1}]}}, "keyword oneOf is not supported where"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, "/\\$defs/none"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength"),
        ({"json_schema": {"type": "strange"}}, "strange"),
        ({"json_schema": {"minimum": 10**400}}, "cannot be read: number out of range"),
        ({"json_schema": {"$ref": "#"}}, "no text|no mask"),
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "()"}, "allows no text but the empty one"),
        ({"regex": "[^\x00-\U0010ffff]"}, "allows no text$"),
        ({"regex": "[^\\s\\S]"}, "allows no text$"),
        ({"json_schema": {"$ref": "#"}}, "allows no text$"),
        ({"grammar": "start: a\na: b\nb: a"}, "allows no text$"),
        ({"grammar": 'start: "a" b\nb: b'}, "allows no text that begins so$"),
        ({"json_schema": {"$schema": "http://nope"}}, "names a schema that is not known, 'http://nope'"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": 'begin: "a"'}, "start"),
        ({"grammar": 'start: "a'}, r"1\(10\): lexer error"),
        ({"regex": "(a?){50000}a{50000}"}, "too many|too big"),
        ({"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}}, "Current row|too big"),
    ],
    ids=lambda value: f"{value!r:.50}",
)
def test_refusals_name_what_is_wrong(compiler: GrammarCompiler, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        compiled(compiler, **fields)
    assert [refused.value.field] == list(fields)


def test_what_grows_too_large_later_ends_in_an_error(compiler: GrammarCompiler) -> None:
    """Not in a mask that takes seconds, and not in memory that has no end. The next request starts afresh."""
    fields = {"regex": r"x{10}(\w{0,100}a\w{0,100}){10}"}
    for _ in range(2):
        masker = compiled(compiler, **fields).masker()
        follow(masker, b"x" * 10)
        with pytest.raises(ConstraintFailed, match=r"regex: no mask can be made any more: .*too many"):
            generate(masker, b"a" * 500)


def test_a_lexer_is_not_kept_for_ever(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aphoton.sampling.compiledgrammar.USES", 3)
    first = compiled(compiler, regex="[a-f]+")
    maskers = [compiled(compiler, regex="[a-f]+").masker() for _ in range(3)]
    assert first.spent and compiled(compiler, regex="[a-f]+") is not first
    assert all(follow(masker, b"abc") == [False] * 3 for masker in maskers)


def test_lark_with_json_and_limits(compiler: GrammarCompiler) -> None:
    ready = compiled(compiler, grammar='start: "<" %json {"type": "integer"} ">"')
    assert follow(ready.masker(), b"<12>")[-1]
    masker = compiled(compiler, grammar='start: x "c"\nx[max_tokens=2]: /a+/').masker()
    follow(masker, b"aa")
    assert mask_of(masker) == {ord("c")}


@pytest.mark.parametrize(
    ("link", "length"),
    [
        (lambda ref: {"$ref": ref}, 190),
        (lambda ref: {"properties": {"x": {"$ref": ref}}, "required": ["x"]}, 125),
        (lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]}, 125),
        (lambda ref: {"prefixItems": [{"items": {"$ref": ref}}]}, 95),
    ],
    ids=["references", "properties", "alternatives", "items"],
)
async def test_the_deepest_that_is_allowed_compiles(link: Any, length: int) -> None:
    """In a worker thread, on whose stack the compiler recurses."""
    defs = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "string"}}}
    compiler = GrammarCompiler(byte_vocabulary())
    grammar = Grammar.of(json_schema=schema)
    assert grammar is not None
    assert mask_of((await compiler.compile(grammar)).masker())


def test_a_mask_costs_what_the_last_ones_took(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    masker = compiled(compiler, regex="a*").masker()
    times = iter([0.0, 0.0001, 1.0, 1.02, *(float(i) for i in range(2, 100) for _ in range(2))])
    monkeypatch.setattr("aphoton.sampling.grammarmasker.clock", lambda: next(times))
    masker.cost = 0.0
    mask_of(masker)
    assert masker.cost == pytest.approx(0.0001)
    mask_of(masker)  # of 20 ms
    assert masker.cost > QUICK
    for _ in range(45):
        mask_of(masker)
    assert masker.cost < QUICK


def test_a_new_grammar_is_timed_before_it_is_used(compiler: GrammarCompiler) -> None:
    ready = compiled(compiler, regex="[ab]*")
    assert 0 < ready.cost < 0.1 and ready.masker().cost == ready.cost
    vocabulary = byte_vocabulary()
    slow = CompiledGrammar("regex", ready.masker().matcher, vocabulary, cost=0.001)
    assert slow.masker().cost == 0.001


async def test_compiling_is_off_the_loop_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_vocabulary())
    threads: list[int] = []
    original = GrammarCompiler._compile

    def spy(self: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
        threads.append(threading.get_ident())
        return original(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", spy)
    grammar = Grammar.of(regex="a+")
    assert grammar is not None
    first = await compiler.compile(grammar)
    assert await compiler.compile(Grammar(kind="regex", text="a+")) is first
    assert len(threads) == 1 and threads[0] != threading.get_ident()


async def test_all_who_ask_at_once_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads that are not the app's. An error is told to each, as one of its own."""
    compiler = GrammarCompiler(byte_vocabulary())
    tried: list[str] = []
    original = GrammarCompiler._compile

    def spy(self: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
        tried.append(grammar.text)
        return original(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", spy)
    limiter = anyio.to_thread.current_default_thread_limiter()
    for borrower in range(taken := int(limiter.available_tokens)):
        limiter.acquire_on_behalf_of_nowait(borrower)
    try:
        with anyio.fail_after(10):
            ready = await asyncio.gather(*(compiler.compile(Grammar(kind="regex", text="a+")) for _ in range(8)))
            errors = await asyncio.gather(
                *(compiler.compile(Grammar(kind="regex", text="(")) for _ in range(8)), return_exceptions=True
            )
    finally:
        for borrower in range(taken):
            limiter.release_on_behalf_of(borrower)
    assert len(set(map(id, ready))) == 1 and tried == ["a+", "("]
    assert len(set(map(id, errors))) == 8 and {type(error) for error in errors} == {InvalidRequest}
    assert not compiler._compiling


async def test_two_first_requests_build_one_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []

    def count(*args: Any, **kwargs: Any) -> LLTokenizer:
        built.append(args)
        return LLTokenizer(*args, **kwargs)

    count.json_slices = LLTokenizer.json_slices  # type: ignore[attr-defined]
    monkeypatch.setattr("aphoton.sampling.grammarvocabulary.LLTokenizer", count)
    compiler = GrammarCompiler(byte_vocabulary())
    grammars = [Grammar(kind="regex", text="a" * n) for n in range(1, 9)]
    ready = await asyncio.gather(*(compiler.compile(grammar) for grammar in grammars))
    assert len(built) == 1 and len(set(map(id, ready))) == 8


async def test_a_caller_that_leaves_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_vocabulary())
    started, go_on, done = threading.Event(), threading.Event(), threading.Event()
    original = GrammarCompiler._compile

    def slow(self: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
        started.set()
        go_on.wait()
        return original(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    grammar = Grammar(kind="regex", text="a+")

    def compile_and_tell(given: Grammar) -> CompiledGrammar:
        try:
            return GrammarCompiler.compile_here(compiler, given)
        finally:
            done.set()

    monkeypatch.setattr(compiler, "compile_here", compile_and_tell)
    task = asyncio.create_task(compiler.compile(grammar))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await asyncio.to_thread(done.wait)
    monkeypatch.undo()
    kept = await compiler.compile(grammar)
    assert mask_of(kept.masker()) == {ord("a")}


def test_the_last_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aphoton.sampling.grammarcompiler.CACHED", 2)
    compiler = GrammarCompiler(byte_vocabulary())
    a, _b = compiled(compiler, regex="a"), compiled(compiler, regex="b")
    assert compiled(compiler, regex="a") is a
    compiled(compiler, regex="c")
    assert compiled(compiler, regex="a") is a
    assert compiled(compiler, regex="b") is not _b


@pytest.mark.parametrize("threads", [1, 2])
def test_many_masks_at_once(compiler: GrammarCompiler, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parallel as one by one; an error is its own sequence's."""
    monkeypatch.setattr(aphoton.sampling.masks, "THREADS", threads)
    ready = compiled(compiler, json_schema=FORM)
    endless = compiled(GrammarCompiler(byte_vocabulary(eos_ids=())), choices=["k", "kk"])

    class Without:
        cost = 0.0

        def fill(self, mask: Any) -> None:
            mask[:] = 0xFFFFFFFF
            mask[-1] = (1 << VOCAB % 32) - 1
            mask[ord("o") // 32] &= ~np.uint32(1 << ord("o") % 32)

        def accept(self, token: int) -> bool:
            return False

    def make() -> list[Any]:
        maskers: list[Any] = [ready.masker() for _ in range(6)]
        for i, masker in enumerate(maskers):
            follow(masker, b'{"name": "Jo", "age": 30, "tags": ["a"]'[: 5 * i])
            masker.cost = float(i % 2)
        broken = ready.masker()
        broken.accept(ord("z"))
        rules = Rules([ready.masker(), Without()], ["json_schema", "bad_words"])
        for byte in b'{"name":"':
            rules.accept(byte)
        return [*maskers, broken, endless.masker(), Without(), rules, ready.masker(min_tokens=2, banned=(ord("{"),))]

    maskers = make()
    masks = np.full((len(maskers), mask_words(VOCAB)), 0xA5A5A5A5, np.uint32)
    errors = fill_all(maskers, masks)
    assert list(errors) == [6] and isinstance(errors[6], ConstraintFailed)
    for i, masker in enumerate(make()):
        if i != 6:
            assert bits(masks[i]) == mask_of(masker), i
    assert bits(masks[9]) and ord("o") not in bits(masks[9]) and ord("p") in bits(masks[9])


def test_a_crowd_learns_what_it_costs(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aphoton.sampling.masks, "THREADS", 2)
    times = iter([0.0, 1.0, 0.0, 2e-4])
    monkeypatch.setattr(aphoton.sampling.masks, "perf_counter", times.__next__)
    maskers = [compiled(compiler, regex="a+").masker() for _ in range(4)]
    for masker in maskers:
        masker.cost = 0.3e-3
    assert not fill_all(maskers, np.zeros((4, mask_words(VOCAB)), np.uint32))
    assert [masker.cost for masker in maskers] == [0.5] * 4, "two at a time, slow or not"
    assert not fill_all(maskers, np.zeros((4, mask_words(VOCAB)), np.uint32))
    assert [masker.cost for masker in maskers] == [pytest.approx(0.40002)] * 4


def test_a_crowd_that_is_quick_is_seen_to_be(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waking the threads takes longer than the masks: that is not what they cost."""
    monkeypatch.setattr(aphoton.sampling.masks, "THREADS", 8)
    maskers = [compiled(compiler, regex="a+").masker() for _ in range(32)]
    masks = np.zeros((32, mask_words(VOCAB)), np.uint32)
    for masker in maskers:
        masker.cost = 0.3e-3
    seconds = 0.0

    def waking() -> float:
        nonlocal seconds
        seconds += 0.4e-3
        return seconds

    with monkeypatch.context() as patch:
        patch.setattr(aphoton.sampling.masks, "perf_counter", waking)
        patch.setattr(aphoton.sampling.masks, "clock", iter(lambda: 0.0, 1.0).__next__)
        for _ in range(20):
            assert not fill_all(maskers, masks)
    assert all(masker.cost < QUICK / 10 for masker in maskers)


def test_one_by_one_each_learns_what_it_costs(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the time in which the thread did not run is nobody's."""
    masks = np.zeros((3, mask_words(VOCAB)), np.uint32)
    maskers = [compiled(compiler, regex="a+").masker() for _ in range(3)]
    for masker in maskers:
        masker.cost = 1e-5
    monkeypatch.setattr(aphoton.sampling.masks, "perf_counter", iter([0.0, 1e-5, 0.02, 0.02001]).__next__)
    monkeypatch.setattr(aphoton.sampling.masks, "clock", iter([0.0, 4e-5]).__next__)
    assert not fill_all(maskers, masks)
    assert [masker.cost for masker in maskers] == [pytest.approx(cost) for cost in (1e-5, 4e-5, 1e-5)]
    monkeypatch.setattr(aphoton.sampling.masks, "perf_counter", iter([0.0, 1e-5, 0.02, 0.02001]).__next__)
    monkeypatch.setattr(aphoton.sampling.masks, "clock", iter([0.0, 0.02]).__next__)
    assert not fill_all(maskers, masks)
    assert maskers[1].cost > QUICK > max(maskers[0].cost, maskers[2].cost)


def test_what_the_loop_may_do(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to one that takes long; and of quick ones those that its turn has time for."""
    ready = compiled(compiler, json_schema=FORM)
    masks = np.full((4, mask_words(VOCAB)), 0xA5A5A5A5, np.uint32)

    def make(*costs: float) -> list[Any]:
        maskers = [ready.masker() for _ in costs]
        for masker, cost in zip(maskers, costs, strict=True):
            masker.cost = cost
        return maskers

    monkeypatch.setattr(aphoton.sampling.masks, "perf_counter", lambda: 0.0)
    assert fill_quick([], masks[:0]) == (0, {})
    assert fill_quick(make(0.0, QUICK, 2 * QUICK, 0.0), masks) == (2, {})
    assert bits(masks[0]) == bits(masks[1]) == mask_of(ready.masker()) and (masks[2:] == 0xA5A5A5A5).all()
    monkeypatch.setattr(aphoton.sampling.masks, "perf_counter", iter([5.0, 5.0004, 5.0009, 5.0011]).__next__)
    assert fill_quick(make(0.0, 0.0, 0.0, 0.0), masks) == (3, {})
    assert bits(masks[2]) == mask_of(ready.masker()) and (masks[3] == 0xA5A5A5A5).all()


@pytest.mark.parametrize("eos_ids", [(EOS,), ()])
def test_tokens_that_a_grammar_names_and_the_model_lacks(
    eos_ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's vocabulary has one more."""
    compiler = GrammarCompiler(byte_vocabulary(eos_ids=eos_ids))
    for grammar in (f"start: <[{VOCAB}]>", f'start: "a" <[{VOCAB}]>', f"start: <[{VOCAB}]> <[{VOCAB}]>"):
        with pytest.raises(InvalidRequest, match=r"allows no text|token"):
            compiled(compiler, grammar=grammar)
    ready = compiled(compiler, grammar="start: <[*]> <[*]>")
    allowed = mask_of(ready.masker())
    assert max(allowed) < VOCAB
    monkeypatch.setattr(aphoton.sampling.masks, "THREADS", 2)
    for cost in (0.0, 1.0):  # one by one, and in parallel
        alone: list[Masker] = [ready.masker() for _ in range(3)]
        ruled: list[Masker] = [Rules([ready.masker()], ["grammar"]) for _ in range(3)]
        for masker in alone + [masker.first for masker in ruled if isinstance(masker, Rules)]:
            assert isinstance(masker, GrammarMasker)
            masker.cost = cost
        for maskers in (alone, ruled, [ruled[0], alone[0]]):
            masks = np.full((len(maskers), mask_words(VOCAB)), 0xFFFFFFFF, np.uint32)
            if cost:
                assert not fill_all(maskers, masks)
            else:
                assert fill_quick(maskers, masks) == (len(maskers), {})
            assert [bits(mask) for mask in masks] == [allowed] * len(maskers)


def test_forced_text_has_the_models_own_tokens() -> None:
    """Where one text alone may come, its tokens are the tokenizer's, not any that fit; and only if they spell it."""
    pieces = [*BYTES, b"he", b"llo", b"hel", b"lo"]
    told: list[str] = []

    def encode(text: str) -> list[int]:
        told.append(text)
        return [256, 257] if text == "hello" else [0]

    compiler = GrammarCompiler(GrammarVocabulary(pieces, vocab_size=260, encode=encode))
    assert mask_of(compiled(compiler, regex="hello").masker(), 260) == {256} and "hello" in told
    # This encoder's tokens spell another text: the longest that fit are taken.
    assert mask_of(compiled(compiler, regex="help").masker(), 260) == {258} and "help" in told


def test_a_forced_text_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all sequences; but not every text is kept for ever."""
    told: list[str] = []

    def encode(text: str) -> list[int]:
        told.append(text)
        return list(text.encode())

    monkeypatch.setattr("aphoton.sampling.grammarvocabulary.FORCED", 10)
    monkeypatch.setattr("aphoton.sampling.grammarvocabulary.FORCED_LENGTH", 5)
    compiler = GrammarCompiler(GrammarVocabulary(BYTES, vocab_size=256, encode=encode))

    def times(text: str) -> int:
        """That it is encoded for the first masks of four sequences."""
        ready = compiled(compiler, regex=text)
        told.clear()
        assert [mask_of(ready.masker(), 256) for _ in range(4)] == [{ord(text[0])}] * 4
        return told.count(text)

    assert [times("hello"), times("longer")] == [0, 4]
    for text in ("abcd", "bcde", "cdef", "defg", "efgh", "fghi", "ghij"):
        compiled(compiler, regex=text)
    assert [times("hello"), times("hello")] == [1, 0]


def test_a_tokenizer_that_misspells_is_kept_too() -> None:
    """The longest tokens that fit are taken each time."""
    told: list[str] = []

    def encode(text: str) -> list[int]:
        told.append(text)
        return [0]

    compiler = GrammarCompiler(GrammarVocabulary([*BYTES, b"he"], vocab_size=257, encode=encode))
    for _ in range(3):
        compiler._compiled.clear()
        assert mask_of(compiled(compiler, regex="hello").masker(), 257) == {256}
    assert told.count("hello") == 1


@pytest.fixture(scope="module")
def smollm2_text(smollm2: Path) -> Tokenizer:
    fields = gguf.GGUFReader(smollm2).fields
    return Tokenizer.from_gguf({name: field.contents() for name, field in fields.items() if "tokenizer." in name})


@pytest.mark.real_model
def test_random_json_of_a_real_vocabulary(smollm2_text: Tokenizer) -> None:
    """And what the model's own tokenizer makes of a valid text is allowed, token by token."""
    text = smollm2_text
    size = text.vocab_size + 100
    compiler = GrammarCompiler(
        GrammarVocabulary(
            text.vocabulary.pieces,
            special_ids=text.special_ids,
            eos_ids=text.eos_token_ids,
            vocab_size=size,
            encode=lambda part: text.encode(part, add_special_tokens=False, parse_special=False),
        )
    )
    grammar = Grammar.of(json_schema=FORM)
    assert grammar is not None
    ready = compiler.compile_here(grammar)
    for seed in range(10):
        model = RandomModel(seed, text.vocabulary.pieces, patience=40)
        output = model.generate(ready.masker(), size, text.eos_token_ids)
        assert output is not None
        assert list(grammar.parse(text.decode(output))) == list(FORM["properties"])
    for valid in (
        '{"name": "Ada Lovelace", "age": 36, "tags": ["a", "b"], "at": "1815-12-10"}',
        '{"name":"Ada Lovelace","age":36,"tags":[],"at":"1815-12-10"}',
    ):
        masker = ready.masker()
        ids = text.encode(valid, add_special_tokens=False, parse_special=False)
        for i, token in enumerate(ids):
            assert token in mask_of(masker, size), (valid, text.token_bytes(token))
            assert masker.accept(token) == (i == len(ids) - 1)
