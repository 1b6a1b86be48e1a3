"""Where a request ends, and what its text is then."""

from typing import Any, Literal

import pytest
from engine.machines import Counting, machine
from engine.simulated import EOS, saying
from engine.waiting import idle

from aphoton import Completion, Engine, Piece


async def both(engine: Engine, prompt: Any, **sampling: Any) -> Completion:
    """`generate`, and the same streamed piece by piece, which must agree."""
    done = await engine.generate(prompt, **sampling)
    stream = engine.stream(prompt, **sampling)
    pieces: list[Piece] = [piece async for piece in stream]
    assert "".join(piece.text for piece in pieces) == done.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == done.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [done.finish_reason]
    assert (await stream.completion()).outputs == done.outputs
    return done


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("text", "sampling", "expected", "reason", "stop"),
    [
        ("Hello world, and more", {"stop": "world"}, "Hello ", "stop", "world"),
        ("Hello world, and more", {"stop": ["more", "ld,"]}, "Hello wor", "stop", "ld,"),
        ("Hello world", {"stop": "H"}, "", "stop", "H"),
        ("Hello world", {"stop": ("o w", "wo")}, "Hell", "stop", "o w"),
        ("Hello world", {"stop": "xyz"}, "Hello world", "stop", EOS),
        ("Hello wor", {"stop": "world"}, "Hello wor", "stop", EOS),  # held back, and released at the end
        ("naïve 🙂 smile", {"stop": "🙂"}, "naïve ", "stop", "🙂"),
        ("日本語です", {"stop": "語で"}, "日本", "stop", "語で"),
        ("aXbXc", {"stop": "X", "min_tokens": 1}, "a", "stop", "X"),
        ("aXbXc", {"stop": "X", "min_tokens": 2}, "a", "stop", "X"),
        ("aXbXc", {"stop": "X", "min_tokens": 3}, "aXb", "stop", "X"),
        ("aXYXYc", {"stop": "XY", "min_tokens": 2}, "a", "stop", "XY"),
        ("aXYXYc", {"stop": "XY", "min_tokens": 3}, "a", "stop", "XY"),
        ("aXYXYc", {"stop": "XY", "min_tokens": 4}, "aXY", "stop", "XY"),
        ("aXbXc", {"stop": "X", "min_tokens": 5}, "aXbXc", "stop", EOS),
        ("Hello world", {"stop": "lo", "max_tokens": 5}, "Hel", "stop", "lo"),  # at the same token
        ("Hello world", {"stop": "lo", "max_tokens": 4}, "Hell", "length", None),
        ("Hello", {"max_tokens": 6}, "Hello", "stop", EOS),  # at the same token
        ("Hello", {"max_tokens": 5}, "Hello", "length", None),
        ("日本語", {"max_tokens": 4}, "日\ufffd", "length", None),
        ("日本語", {"max_tokens": 4, "stop": "語"}, "日\ufffd", "length", None),
        ("Hello", {"stop_token_ids": [ord("l")]}, "He", "stop", ord("l")),
        ("Hello", {"stop_token_ids": [ord("l")], "min_tokens": 3, "max_tokens": 3}, "Hem", "length", None),
        ("Hello", {"stop_token_ids": [ord("l")], "stop": "l"}, "He", "stop", ord("l")),
    ],
)
async def test_text(
    text: str, sampling: dict[str, Any], expected: str, reason: str, stop: str | int | None, depth: Literal[1, 2]
) -> None:
    async with Engine(saying(text), pipeline_depth=depth) as engine:
        done = await both(engine, [1], **sampling)
        assert (done.text, done.finish_reason, done.outputs[0].stop_reason) == (expected, reason, stop)
        if isinstance(stop, str):
            assert bytes(done.token_ids).decode() == text[: len(bytes(done.token_ids).decode())]
            shown = await both(engine, [1], include_stop_str_in_output=True, **sampling)
            assert shown.text == expected + stop
            assert shown.token_ids == done.token_ids
        await idle(engine)


@pytest.mark.parametrize(("stop", "shown"), [("\ufffd", "日"), ("日\ufffd", ""), ("\ufffdx", "日\ufffd")])
async def test_a_stop_string_that_only_the_end_completes(stop: str, shown: str) -> None:
    """By the mark of a character that is cut short."""
    async with Engine(saying("日本語")) as engine:
        done = await both(engine, [1], max_tokens=4, stop=stop)
        found = stop if done.text != "日\ufffd" else None
        assert (done.text, done.outputs[0].stop_reason) == (shown, found)
        assert done.finish_reason == ("length" if found is None else "stop")
        await idle(engine)


async def test_no_piece_ever_shows_what_may_become_a_stop_string_or_half_a_character() -> None:
    text = "say stop or 日本 STO or STOP, and no more"
    async with Engine(saying(text)) as engine:
        shown = ""
        async for piece in engine.stream([1], stop="STOP"):
            shown += piece.text
            assert text.startswith(shown) and "\ufffd" not in shown
            assert len(shown) <= text.index("STOP")
    assert shown == "say stop or 日本 STO or "


async def test_many_requests_with_and_without_stop_strings_side_by_side() -> None:
    async with Engine(saying("one two three four"), max_rows=3) as engine:
        stops = ["two", "three", "four", "e", "never"]
        streams = [engine.stream([1], stop=stop) for stop in stops] + [engine.stream([1], max_tokens=9)]
        texts = [(await stream.completion()).text for stream in streams]
    assert texts == ["one ", "one two ", "one two three ", "on", "one two three four", "one two t"]


@pytest.mark.parametrize("depth", [1, 2])
async def test_end_tokens_on_the_cpu(depth: Literal[1, 2], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model counts, and 299 is its end token."""
    async with machine(monkeypatch, Counting(), pipeline_depth=depth) as engine:
        done = await both(engine, [295])
        assert (done.token_ids, done.finish_reason) == ((296, 297, 298, 299), "stop")
        assert done.text == "<296><297><298>" and done.outputs[0].stop_reason == 299

        done = await both(engine, [295], ignore_eos=True, max_tokens=6)
        assert (done.token_ids, done.finish_reason) == ((296, 297, 298, 299, 0, 1), "length")
        assert done.text.startswith("<296><297><298><299>") and done.outputs[0].stop_reason is None

        done = await both(engine, [295], ignore_eos=True, stop_token_ids=[299])
        assert (done.token_ids, done.finish_reason) == ((296, 297, 298, 299), "stop")

        done = await both(engine, [60], stop_token_ids=[70, 66])
        assert (done.text, done.token_ids[-1], done.outputs[0].stop_reason) == ("=>?@A", 66, 66)

        # 299 must not be sampled yet, so the next likeliest is: 0, and the model counts from there.
        done = await both(engine, [297], min_tokens=3, max_tokens=5)
        assert done.token_ids == (298, 0, 1, 2, 3)
        done = await both(engine, [297], min_tokens=1, max_tokens=5)
        assert done.token_ids == (298, 299)
        done = await both(engine, [298], min_tokens=1, max_tokens=3, stop_token_ids=[0])
        assert done.token_ids == (1, 2, 3)
        await idle(engine)


@pytest.mark.parametrize("model", ["sim", "random:tiny"])
async def test_without_max_tokens_it_runs_to_the_models_length(model: str) -> None:
    async with Engine(model, device="sim" if model == "sim" else "auto", max_model_len=50) as engine:
        done = await engine.generate([1, 2, 3], max_tokens=None, ignore_eos=True)
        assert (len(done.token_ids), done.finish_reason) == (47, "length")
        done = await engine.generate([1] * 49, max_tokens=100, ignore_eos=True)
        assert (len(done.token_ids), done.finish_reason) == (1, "length")
        await idle(engine)
