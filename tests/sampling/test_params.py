"""`SamplingParams` by itself; what an engine refuses at the call is tested with the engine."""

from typing import Any

import pytest

from aphoton import SamplingParams


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


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
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


def test_they_do_not_change() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.top_k = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[misc, call-arg]
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=5)  # type: ignore[call-arg]
