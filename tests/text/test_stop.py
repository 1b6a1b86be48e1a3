"""`StopStrings`, against a search of the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aphoton.text import StopStrings

# Few letters, so that stop strings overlap, hold one another and nearly match.
words = st.text("ab🙂", min_size=1, max_size=5)
stop_lists = st.lists(words, max_size=5)


def search(text: str, stops: list[str], after: int = 0) -> tuple[int, str] | None:
    """(begin, stop string) of the one that ends first, beyond ``after``, and of those the longest."""
    found = [
        (at + len(stop), -len(stop), at, stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > after
    ]
    return min(found)[2:] if found else None


@st.composite
def chunked(draw: st.DrawFn) -> list[str]:
    text = draw(st.text("ab🙂", max_size=40))
    places = sorted(draw(st.lists(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(chunked(), stop_lists, st.booleans())
def test_against_a_search_of_the_whole(chunks: list[str], stops: list[str], include: bool) -> None:
    matcher = StopStrings(stops, include=include)
    seen = shown = ""
    for chunk in chunks:
        hit_before = matcher.hit
        piece = matcher.push(chunk)
        seen += chunk
        shown += piece
        found = search(seen, stops)
        assert matcher.hit == (found and found[1])
        if hit_before is not None:
            assert piece == ""
        elif found is not None:
            begin, stop = found
            assert shown == seen[: begin + (len(stop) if include else 0)]
        else:
            # Held back: the longest end of the text that a stop string begins with, and no more.
            held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
            assert shown == seen[: len(seen) - held]
    shown += matcher.finish()
    found = search(seen, stops)
    if found is None:
        assert shown == seen
    else:
        assert shown == seen[: found[0] + (len(found[1]) if include else 0)]


@given(chunked(), stop_lists, st.integers(0, 40), st.booleans())
def test_ends_that_do_not_count_yet(chunks: list[str], stops: list[str], first: int, include: bool) -> None:
    """A stop string may begin where none may end."""
    matcher = StopStrings(stops, include=include).fresh()
    seen = shown = ""
    after = 0
    for number, chunk in enumerate(chunks):
        shown += matcher.push(chunk, ends=number >= first)
        seen += chunk
        after = len(seen) if number < first else after
        found = search(seen, stops, after) if number >= first else None
        assert matcher.hit == (found and found[1])
        if found is not None:
            assert shown == seen[: found[0] + (len(found[1]) if include else 0)]
            return
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert shown == seen[: len(seen) - held]
    assert shown + matcher.finish() == seen


def test_text_that_turns_out_not_to_stop() -> None:
    matcher = StopStrings(["</end>"])
    assert [matcher.push(piece) for piece in ("a<", "/en", "x<", "/end", ">b")] == ["a", "", "</enx", "", ""]
    assert matcher.hit == "</end>"
    assert matcher.push("more") == matcher.finish() == ""


def test_the_first_end_wins_then_the_longest() -> None:
    for stops, hit, shown in ((["abcd", "bc"], "bc", "xa"), (["bc", "abc"], "abc", "x"), (["c", "abc"], "abc", "x")):
        matcher = StopStrings(stops)
        assert matcher.push("xabcd") == shown
        assert matcher.hit == hit


def test_include() -> None:
    matcher = StopStrings(["\n\n"], include=True)
    assert matcher.push("a\n") + matcher.push("\nb") == "a\n\n"


@pytest.mark.parametrize("stops", [[], [""]])
def test_no_stops(stops: list[str]) -> None:
    matcher = StopStrings(stops)
    assert matcher.push("text") == "text"
    assert matcher.finish() == ""
    assert matcher.hit is None


def test_nothing_is_scanned_twice() -> None:
    """A text that nearly stops all the time: each character is looked up a bounded number of times."""
    matcher = StopStrings(["a" * 50 + "b"])
    lookups = 0

    class Counting(dict[str, int]):
        def get(self, key: str, default: int | None = None) -> int | None:  # type: ignore[override]
            nonlocal lookups
            lookups += 1
            return super().get(key, default)

    matcher._steps = [Counting(step) for step in matcher._steps]
    for _ in range(2000):
        matcher.push("a")
    assert lookups <= 2 * 2000
