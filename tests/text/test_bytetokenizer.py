"""`ByteTokenizer`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aphoton.errors import InvalidRequest, ModelError
from aphoton.text import ByteTokenizer


@given(st.text(st.characters(codec="utf-8")))
def test_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer(512)
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@given(st.lists(st.integers(0, 255)))
def test_any_bytes_decode_as_python_decodes_them(ids: list[int]) -> None:
    assert ByteTokenizer(256).decode(ids) == bytes(ids).decode(errors="replace")


def test_ids_beyond_the_bytes_show_as_numbers() -> None:
    tokenizer = ByteTokenizer(512, eos_token_ids=[300])
    assert tokenizer.decode([65, 256, 511, 300, 66]) == "A<256><511>B"
    assert tokenizer.decode([300], skip_special_tokens=False) == "<300>"
    assert tokenizer.decode([512]) == ""
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.special_ids) == (512, (300,), {300})


def test_refusals() -> None:
    with pytest.raises(ModelError, match="255 tokens"):
        ByteTokenizer(255)
    with pytest.raises(InvalidRequest, match="surrogate"):
        ByteTokenizer(256).encode("\udc00")
