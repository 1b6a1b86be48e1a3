"""`SamplingParams` by itself; what an engine refuses at the call is tested with the engine."""

import copy
import functools
import itertools
import json
import pickle
from typing import Any

import msgspec
import pytest

from aphoton import InvalidRequest, SamplingParams
from aphoton.sampling import Grammar


def test_defaults_are_greedy_and_end() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.min_tokens) == (0.0, 256, 0)
    assert (params.top_k, params.top_p, params.min_p, params.logprobs, params.seed) == (0, 1.0, 0.0, None, None)
    assert params.stop_strings == () and not params.ignore_eos and not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("end", ("end",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), ((), ()), ("🙂", ("🙂",))],
)
def test_stop_strings_in_any_form(stop: Any, expected: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == expected


def test_the_callers_lists_are_copied() -> None:
    stops, ids = ["a"], [1]
    params = SamplingParams(stop=stops, stop_token_ids=ids)
    stops.append("b")
    ids.append(-1)
    assert params.stop_strings == ("a",) and tuple(params.stop_token_ids) == (1,)
    bias, allowed, words, schema = {7: 1, 5: -2.0}, [3, 1, 3], ["bad"], {"type": "object", "properties": {"a": {}}}
    params = SamplingParams(logit_bias=bias, allowed_token_ids=allowed, bad_words=words, json_schema=schema)
    bias[1] = 500
    allowed.append(-1)
    words.append("")
    schema["properties"]["a"]["type"] = "no such type"  # type: ignore[index]
    assert params.logit_bias == ((5, -2.0), (7, 1.0))
    assert (params.allowed_token_ids, params.bad_words) == ((1, 3), ("bad",))
    assert params.json_schema == {"type": "object", "properties": {"a": {}}}
    choices = ["yes", "no"]
    params = SamplingParams(choices=choices)
    choices.clear()
    assert params.choices == ("yes", "no")
    assert SamplingParams(**msgspec.structs.asdict(params)) == params, "what is kept is what may be given"


def test_a_schema_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often parameters are made from others, and a grammar from them."""
    written: list[object] = []
    dumps = json.dumps

    def count(given: object, **options: Any) -> str:
        written.append(given)
        return dumps(given, **options)

    monkeypatch.setattr(json, "dumps", count)
    params = SamplingParams(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    again = SamplingParams(**{**msgspec.structs.asdict(params), "max_tokens": 5})
    assert again.json_schema is params.json_schema
    grammar = Grammar.of(json_schema=again.json_schema)
    assert len(written) == 1
    assert grammar is not None and json.loads(grammar.text) == params.json_schema
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


def test_all_but_a_schema_that_is_a_dictionary_is_hashable() -> None:
    params = SamplingParams(
        logit_bias={1: 2}, allowed_token_ids=[1], bad_words=["x"], choices=["a"], n=2, processor=print
    )
    assert len({params, SamplingParams(**msgspec.structs.asdict(params)), SamplingParams()}) == 2
    assert hash(SamplingParams(json_schema=int)) == hash(SamplingParams(json_schema=int))


GRAMMARS: dict[str, Any] = {
    "json_schema": {"type": "object"},
    "json_object": True,
    "regex": "a+",
    "choices": ["a"],
    "grammar": 'start: "a"',
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(GRAMMARS, 2)))
def test_one_grammar_at_most(one: str, other: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{one} and {other}") as caught:
        SamplingParams(**{one: GRAMMARS[one], other: GRAMMARS[other]})
    assert caught.value.field == other
    assert SamplingParams(**{one: GRAMMARS[one]}).constrained
    assert not SamplingParams(json_object=False, bad_words=["a"]).constrained


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"n": 1},
        {"n": 64},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 64},
        {"presence_penalty": -2},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 10},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, 1: 100}},
        {"logit_bias": dict.fromkeys(range(1024), 0.5)},
        {"allowed_token_ids": [0]},
        {"bad_words": []},
        {"bad_words": ["x" * 1024] * 256},
        {"json_schema": {}},
        {"json_schema": dict},
        {"json_schema": list[int]},
        {"regex": "x" * (1 << 18)},
        {"choices": ["x"] * 4096},
        {"priority": -(2**31)},
        {"priority": 2**31 - 1},
        {"deadline": 1e-300},
        {"deadline": 10**9},
        {"use_prefix_cache": False},
        {"use_prefix_cache": True},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 5, "min_tokens": 5},
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 1},
        {"top_p": 1e-300},
        {"min_p": 1},
        {"top_k": 0},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"logprobs": 0},
        {"logprobs": 64},
        {"stop": ["x"] * 64},
        {"stop_token_ids": list(range(64))},
    ],
    ids=lambda fields: f"{fields!r:.40}",
)
def test_the_ends_of_what_is_allowed(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert params == SamplingParams(**fields)
    assert hash(SamplingParams(max_tokens=3)) == hash(SamplingParams(max_tokens=3))


def with_call(call: Any) -> Any:
    return type("Callable", (), {"__call__": call})()


async def waits(output: Any, logits: Any) -> None: ...


async def yields(output: Any, logits: Any) -> Any:
    yield


@pytest.mark.parametrize(
    "processor",
    [
        waits,
        yields,
        functools.partial(waits),
        with_call(lambda self, output: None),
        lambda: None,
        lambda output: None,
        lambda output, logits, more: None,
        lambda output, *, logits: None,
    ],
)
def test_a_processor_is_called_with_two_arguments_and_not_awaited(processor: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^processor: must be a function, not async"):
        SamplingParams(processor=processor)


@pytest.mark.parametrize(
    "processor",
    [print, lambda *both: None, lambda output, logits, more=1: None, with_call(lambda self, output, logits: None), max],
)
def test_whatever_takes_two_arguments_may_be_a_processor(processor: Any) -> None:
    assert SamplingParams(processor=processor).processor is processor


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), [10**5000], Unshowable(), [Unshowable()], {1: Unshowable()}],
    ids=["huge", "negative", "list", "object", "objects", "mapping"],
)
@pytest.mark.parametrize(
    "field", [name for name in SamplingParams.__struct_fields__ if name not in ("max_tokens", "min_tokens", "top_k")]
)
def test_whatever_is_refused_is_refused_by_name(field: str, value: Any) -> None:
    """Python writes no integer of so many digits, and a message shows the value."""
    if isinstance(value, list) and field in ("stop_token_ids", "allowed_token_ids") and type(value[0]) is int:
        return  # what the engine says of it is tested there
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as refused:
        SamplingParams(**{field: value})
    assert len(str(refused.value)) < 300


def test_more_tokens_at_least_than_at_most() -> None:
    with pytest.raises(InvalidRequest, match=r"^min_tokens: "):
        SamplingParams(max_tokens=5, min_tokens=10**5000)


@pytest.mark.parametrize("schema", [{"enum": ["x"] * 3_000_000}, {"a": "x" * 300_000}, {"x" * 300_000: 1}])
def test_a_schema_that_is_too_large_is_not_written_first(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("json.dumps", None)
    with pytest.raises(InvalidRequest, match=r"^json_schema: must be at most 262144"):
        SamplingParams(json_schema=schema)


def test_they_do_not_change() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.top_k = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[misc, call-arg]
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=5)  # type: ignore[call-arg]
