"""`Detokenizer`: whatever the cuts, the pieces joined are the decoded whole."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from aphoton.text import ByteTokenizer, Detokenizer, Tokenizer

FAMILY = "👩‍👩‍👧‍👦"


def stream(tokenizer: Tokenizer, chunks: list[list[int]], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.push, chunks), detokenizer.finish()]


@st.composite
def cuts(draw: st.DrawFn, ids: st.SearchStrategy[list[int]]) -> list[list[int]]:
    """Ids, in chunks of any size, empty ones too."""
    whole = draw(ids)
    places = sorted(draw(st.lists(st.integers(0, len(whole)))))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


# Bytes as they come in texts, in broken texts, and at random: lead bytes, tails, overlong forms, surrogates.
broken = st.lists(st.sampled_from([0x41, 0x20, 0x80, 0xBF, 0xC2, 0xE0, 0xE4, 0xED, 0xA0, 0xF0, 0x9F, 0xF4, 0x90, 0xFF]))
unicode_bytes = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(FAMILY + "日本🇩🇪"))).map(
    lambda text: list(text.encode())
)


@given(cuts(st.one_of(broken, unicode_bytes, st.lists(st.integers(0, 255)))))
def test_pieces_are_the_whole(chunks: list[list[int]]) -> None:
    tokenizer = ByteTokenizer(256)
    whole = [i for chunk in chunks for i in chunk]
    pieces = stream(tokenizer, chunks)
    assert "".join(pieces) == tokenizer.decode(whole) == bytes(whole).decode(errors="replace")


@given(cuts(unicode_bytes))
def test_no_piece_breaks_a_character(chunks: list[list[int]]) -> None:
    text = bytes(i for chunk in chunks for i in chunk).decode()
    detokenizer = Detokenizer(ByteTokenizer(256))
    shown, fed = "", b""
    for chunk in chunks:
        shown += detokenizer.push(chunk)
        fed += bytes(chunk)
        # All characters that are complete, and nothing else.
        assert shown == fed.decode(errors="ignore")
    assert shown == text
    assert detokenizer.finish() == ""


def test_a_character_shows_as_soon_as_it_is_complete() -> None:
    chunks = [[byte] for byte in "é日🙂".encode()]
    assert stream(ByteTokenizer(256), chunks) == ["", "é", "", "", "日", "", "", "", "🙂", ""]


def test_an_incomplete_character_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer(256))
    assert detokenizer.push("a日".encode()[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.fixture(scope="module")
def byte_level_pair(
    byte_level: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    byte_level.save(str(path))
    return Tokenizer.from_json(path), byte_level


@given(data=st.data(), skip=st.booleans())
def test_byte_level_decodes_as_the_library(
    byte_level_pair: tuple[Tokenizer, tokenizers.Tokenizer], data: st.DataObject, skip: bool
) -> None:
    ours, theirs = byte_level_pair
    chunks = data.draw(cuts(st.lists(st.integers(0, 405))))
    whole = [i for chunk in chunks for i in chunk]
    text = theirs.decode(whole, skip_special_tokens=skip)
    assert ours.decode(whole, skip) == text
    assert "".join(stream(ours, chunks, skip_special_tokens=skip)) == text


@given(data=st.data())
def test_byte_fallback_decodes_as_the_library_where_bytes_are_text(
    sentencepiece_fields: dict[str, Any], data: st.DataObject
) -> None:
    ours = Tokenizer.from_gguf(sentencepiece_fields)
    tokens = sentencepiece_fields["tokenizer.ggml.tokens"]
    # Words, and characters written as bytes, in any order.
    word = st.integers(259, len(tokens) - 1).map(lambda i: [i])
    character = st.characters(codec="utf-8").map(lambda char: [3 + byte for byte in char.encode()])
    parts = st.lists(st.one_of(word, character)).map(lambda parts: [i for part in parts for i in part])
    chunks = data.draw(cuts(parts))
    whole = [i for chunk in chunks for i in chunk]
    assert "".join(stream(ours, chunks)) == ours.decode(whole) == ours._backend.decode(whole)


def test_byte_fallback_streams_a_broken_run(sentencepiece_fields: dict[str, Any]) -> None:
    """One U+FFFD for each broken part. The library replaces the good character in the run too."""
    ours = Tokenizer.from_gguf(sentencepiece_fields)
    run = [3 + byte for byte in "日".encode() + b"\xff"]
    assert stream(ours, [[i] for i in run]) == ["", "", "日", "\ufffd", ""]
    assert ours._backend.decode(run) == "\ufffd" * 4


def test_leading_space(sentencepiece_fields: dict[str, Any]) -> None:
    ours = Tokenizer.from_gguf(sentencepiece_fields)
    the, space = (sentencepiece_fields["tokenizer.ggml.tokens"].index(token) for token in ("▁the", "▁"))
    assert stream(ours, [[1], [the], [the]]) == ["", "the", " the", ""]
    assert stream(ours, [[space], [the]]) == ["", " the", ""]  # only the one that encoding adds
    assert stream(ours, [[the], [the]], continues=True) == [" the", " the", ""]


def test_sequence_of_decoders(byte_level: tokenizers.Tokenizer, tmp_path: Any) -> None:
    raw = json.loads(byte_level.to_str())
    raw["decoder"] = {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [raw["decoder"]]}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    ours = Tokenizer.from_json(tmp_path / "tokenizer.json")
    assert ours.decode(byte_level.encode("日本 fox").ids) == "日本 fox"


@pytest.mark.real_model
@given(data=st.data())
def test_smollm2_pieces_are_the_whole(smollm2_tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(FAMILY + " the日本")))
    chunks = data.draw(
        cuts(st.one_of(st.lists(st.integers(0, smollm2_tokenizer.vocab_size - 1)), text.map(smollm2_tokenizer.encode)))
    )
    whole = [i for chunk in chunks for i in chunk]
    assert "".join(stream(smollm2_tokenizer, chunks)) == smollm2_tokenizer.decode(whole)
