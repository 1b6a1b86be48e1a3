"""Tokenizers, against the `tokenizers` library, `transformers` and a SentencePiece BPE written out."""

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from aphoton.errors import InvalidRequest, ModelError
from aphoton.text import Tokenizer
from aphoton.text.pretokenizer import PRETOKENIZERS

TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "  two  spaces \n\n\tand\ttabs  ",
    "In 1984, 3.14159 and 1e10; ½ ² Ⅷ ٣",
    "it's I'll DON'T we've '90s",
    "def f(x):\n    return {'a': [x ** 2, -1]}  # ok?\n",
    "日本語のテキスト。你好，世界！안녕하세요",
    "Привет, мир! שלום مرحبا नमस्ते ภาษาไทย",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 \u00e9 \ufeff \u200b",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
]

# Text without surrogates, which are no text; with more of what splits words than chance would bring.
unicode_text = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t'0123456789aAé日🙂\u200d")))


@pytest.mark.real_model
def test_smollm2_gives_the_ids_of_its_own_rule(smollm2_fields: dict[str, Any], smollm2_tokenizer: Tokenizer) -> None:
    """The published tokenizer is GPT-2's, but for digits, which it splits first. (The GGUF reader of transformers
    leaves that out, and so gives other ids for numbers.)"""
    transformers = pytest.importorskip("transformers")
    tokens = smollm2_fields["tokenizer.ggml.tokens"]
    theirs = transformers.GPT2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in smollm2_fields["tokenizer.ggml.merges"]],
    )
    theirs.add_special_tokens({"additional_special_tokens": tokens[:17]})
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # A few control characters and lead bytes are in no token of this model: they are lost.
    known = {piece[0] for piece in smollm2_tokenizer.vocabulary.pieces if len(piece) == 1}
    for text in TEXTS:
        assert smollm2_tokenizer.encode(text) == theirs(text).input_ids, text

    @given(unicode_text)
    def random_text(text: str) -> None:
        ids = smollm2_tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        if all(byte in known for byte in text.encode()):
            assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text

    @given(st.lists(st.integers(0, smollm2_tokenizer.vocab_size - 1)), st.booleans())
    def random_ids(ids: list[int], skip: bool) -> None:
        assert smollm2_tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)

    random_text()
    random_ids()


@pytest.mark.real_model
def test_smollm2_special_tokens(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.encode("Hi<|im_end|>") == [*tokenizer.encode("Hi"), 2]  # and no BOS: the file says so
    literal = tokenizer.encode("Hi<|im_end|>", parse_special=False)
    assert 2 not in literal
    assert tokenizer.decode(literal) == "Hi<|im_end|>"
    assert tokenizer.decode([2, *literal]) == "Hi<|im_end|>"


@pytest.mark.real_model
def test_a_long_text_does_not_hold_the_interpreter(smollm2_tokenizer: Tokenizer) -> None:
    """Other threads, the event loop's for one, run while a long text is encoded."""
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    beats: list[float] = []
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.001):
            beats.append(time.perf_counter())

    thread = threading.Thread(target=beat)
    thread.start()
    begin = time.perf_counter()
    ids = smollm2_tokenizer.encode(text)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert len(ids) >= 180_000
    inside = [begin, *(b for b in beats if begin < b < end), end]
    # A call that held it would leave one gap as long as itself.
    assert max(b - a for a, b in pairwise(inside)) < 0.5 * (end - begin)


@pytest.mark.parametrize("pre", sorted(PRETOKENIZERS))
def test_byte_level_rules(byte_level: tokenizers.Tokenizer, pre: str) -> None:
    """Every rule compiles, splits without loss, and gives what the library gives with it."""
    fields = gguf_fields(byte_level)
    tokenizer = Tokenizer.from_gguf({**fields, "tokenizer.ggml.pre": pre})
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = PRETOKENIZERS[pre].normalizer.normalize_str(text) if PRETOKENIZERS[pre].normalizer else text
        assert tokenizer.decode(ids) == expected
    assert (tokenizer.encode("a")[0] == 0) == PRETOKENIZERS[pre].add_bos


def words(pre: str, text: str) -> list[str]:
    """How a rule splits ``text``."""
    return [text[begin:end] for _, (begin, end) in PRETOKENIZERS[pre].build().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("smollm", "it's 1234  x", ["it", "'s", " ", "1", "2", "3", "4", " ", " x"]),
        ("llama-bpe", "IT'S 1234\n\n x", ["IT", "'S", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "IT'S 1234\n\n x", ["IT", "'S", " ", "1", "2", "3", "4", "\n\n", " x"]),
        ("tekken", "HelloWorld 12 a/b\n", ["Hello", "World", " ", "1", "2", " a", "/b", "\n"]),
    ],
)
def test_pretokenizer_rules_split_as_published(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


def gguf_fields(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """A byte-level tokenizer as GGUF metadata."""
    model = json.loads(backend.to_str())["model"]
    size = backend.get_vocab_size()
    added = backend.get_added_tokens_decoder()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [backend.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.token_type": [(3 if added[i].special else 4) if i in added else 1 for i in range(size)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def test_gguf_and_json_are_the_same_tokenizer(byte_level: tokenizers.Tokenizer, tmp_path: Path) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    from_json = Tokenizer.from_json(tmp_path / "tokenizer.json")
    from_gguf = Tokenizer.from_gguf(gguf_fields(byte_level))
    assert from_json.vocabulary.pieces == from_gguf.vocabulary.pieces
    assert from_json.special_ids == from_gguf.special_ids == {0, 1}
    assert from_json.eos_token_ids == ()  # there is no tokenizer_config.json to name it

    @given(unicode_text)
    def same(text: str) -> None:
        text += "<|end|><added token>"
        ids = from_json.encode(text)
        assert ids == from_gguf.encode(text) == byte_level.encode(text).ids
        assert from_json.decode(ids) == byte_level.decode(ids)
        assert from_json.decode(ids, False) == byte_level.decode(ids, skip_special_tokens=False) == text

    same()


def test_json_with_configuration(byte_level: tokenizers.Tokenizer, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    backend.save(str(tmp_path / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<|start|>"}
    # Beside a tokenizer.json, which says it itself, transformers does not heed add_bos_token.
    config = {"bos_token": bos, "eos_token": "<|end|>", "add_bos_token": True, "other": 1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_json(tmp_path / "tokenizer.json")
    plain = byte_level.encode("The quick brown fox").ids
    assert len(plain) > 3
    assert tokenizer.encode("The quick brown fox") == plain
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|start|>", "<|end|>", (0,))

    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs("The quick brown fox", truncation=False, padding=False).input_ids == plain
    assert (theirs.bos_token, theirs.eos_token) == ("<|start|>", "<|end|>")


def test_json_keeps_its_own_post_processor(byte_level: tokenizers.Tokenizer, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", pair="$A $B", special_tokens=[("<|end|>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    assert Tokenizer.from_json(tmp_path / "tokenizer.json").encode("a")[-1] == 0


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_gguf_adds_bos_and_eos_as_told(byte_level: tokenizers.Tokenizer, bos: bool, eos: bool) -> None:
    fields = gguf_fields(byte_level)
    fields |= {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    plain = byte_level.encode("Hi: there").ids
    assert Tokenizer.from_gguf(fields).encode("Hi: there") == [0] * bos + plain + [1] * eos


def test_gguf_knows_the_ends_of_turns(byte_level: tokenizers.Tokenizer) -> None:
    fields = gguf_fields(byte_level)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    fields["tokenizer.ggml.tokens"] = [*tokens, "<|eot_id|>", "<|im_end|>"]
    fields["tokenizer.ggml.token_type"] = [*types, 3, 1]  # the second is text like any other
    fields["tokenizer.ggml.eot_token_id"] = 0
    assert Tokenizer.from_gguf(fields).eos_token_ids == (1, 0, len(tokens))


def spm_bpe(fields: dict[str, Any], text: str) -> list[int]:
    """SentencePiece BPE as defined: join the neighbours whose union scores best, the leftmost first, until none
    is a token. Here ``text`` has no special token."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [
            (-fields["tokenizer.ggml.scores"][ids[a + b]], at)
            for at, (a, b) in enumerate(pairwise(parts))
            if a + b in ids
        ]
        if not unions:
            break
        at = min(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


@given(st.text(st.sampled_from("▁  ateherin.bcé日本🙂ü\n"), max_size=60))
def test_sentencepiece_is_exact(sentencepiece_fields: dict[str, Any], text: str) -> None:
    text = text.replace("▁", " ")  # the mark itself is not told from a space
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields)
    ids = spm_bpe(sentencepiece_fields, text)
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text


def test_sentencepiece_special_tokens(sentencepiece_fields: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields)
    tokens = sentencepiece_fields["tokenizer.ggml.tokens"]

    def spell(text: str, **options: bool) -> list[str]:
        return [tokens[i] for i in tokenizer.encode(text, **options)]

    assert spell("the") == ["<s>", "▁the"]
    # A space goes before the text after each special token, as llama.cpp does.
    assert spell("the</s>the<user>a") == ["<s>", "▁the", "</s>", "▁the", "<user>", "▁a"]
    assert spell("</s>", add_special_tokens=False, parse_special=False) == [
        "▁", "<0x3C>", "<0x2F>", "s", "<0x3E>"
    ]  # fmt: skip
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, *tokenizer.encode("the a", False), 2]) == "the a"
    assert tokenizer.decode(tokenizer.encode("  the", False)) == "  the"
    no_space = Tokenizer.from_gguf({**sentencepiece_fields, "tokenizer.ggml.add_space_prefix": False})
    assert no_space.decode(no_space.encode(" the", False)) == " the"
    assert [tokens[i] for i in no_space.encode("the")] == ["<s>", "t", "he"]


def test_sentencepiece_of_transformers(sentencepiece_fields: dict[str, Any]) -> None:
    """The same vocabulary through the library's usual shape: a byte-fallback BPE with Metaspace."""
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields)
    backend = tokenizer._backend
    assert isinstance(backend.normalizer, normalizers.Sequence)

    @given(unicode_text)
    def valid_text(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids)

    valid_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', expected 'gpt2' or 'llama'"),
        ({"pre": "nonesuch"}, "tokenizer.ggml.pre is 'nonesuch', which is not known; known: .*llama-bpe.*smollm"),
        ({"tokens": None}, "expected the tokenizer's tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is 'abc', which is of the wrong type"),
        ({"merges": None}, "expected the tokenizer's merges"),
        ({"merges": ["ab"]}, "'ab' in tokenizer.ggml.merges, expected two tokens and a space"),
        ({"merges": ["no such"]}, "does not fit together"),
        ({"token_type": [1]}, "1 entries in tokenizer.ggml.token_type, expected 400"),
        ({"bos_token_id": 400}, "tokenizer.ggml.bos_token_id is 400, expected less than 400"),
        ({"model": "llama"}, None),
        ({"model": "llama", "merges": None}, "expected 400 scores in tokenizer.ggml.scores, or merges"),
    ],
)
def test_gguf_errors_name_file_and_key(
    byte_level: tokenizers.Tokenizer, change: dict[str, Any], message: str | None
) -> None:
    fields = gguf_fields(byte_level) | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    fields = {key: value for key, value in fields.items() if value is not None}
    if message is None:
        assert Tokenizer.from_gguf(fields).encode("")
        return
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_gguf(fields, source="some.gguf")
    assert str(caught.value).startswith("some.gguf: ")


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"version": "1.0", "model": {"type": "No"}}'])
def test_json_errors_name_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer\.json"):
        Tokenizer.from_json(path)


def test_json_that_is_missing_or_has_a_broken_configuration(byte_level: tokenizers.Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_json(tmp_path / "tokenizer.json")
    byte_level.save(str(tmp_path / "tokenizer.json"))
    for content in ('{"bos_token": 3}', '{"extra": ' + "[" * 200_000):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: not a tokenizer configuration"):
            Tokenizer.from_json(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("decoder", [None, tokenizers.decoders.WordPiece(), tokenizers.decoders.Metaspace()])
def test_json_whose_tokens_have_no_bytes(byte_level: tokenizers.Tokenizer, tmp_path: Path, decoder: Any) -> None:
    raw = json.loads(byte_level.to_str())
    raw["decoder"] = decoder and json.loads(decoder.__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer.from_json(tmp_path / "tokenizer.json")


def test_a_lone_surrogate_is_refused(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_fields(byte_level))
    with pytest.raises(InvalidRequest, match=r"U\+D800 at character 2") as caught:
        tokenizer.encode("ab\ud800")
    assert caught.value.field == "text"


def test_ids_outside_the_vocabulary(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_fields(byte_level))
    a = tokenizer.encode("a")
    assert tokenizer.decode([*a, 400, 10**6, *a]) == "aa"
    assert tokenizer.token_bytes(400) == tokenizer.token_bytes(-1) == b""
    with pytest.raises(InvalidRequest, match="ids"):
        tokenizer.decode([-1])
