"""Tokenizers from the metadata of a GGUF file."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from aphoton.errors import ModelError
from aphoton.text.pretokenizer import PRETOKENIZERS, Pretokenizer
from aphoton.text.subword import SubwordTokenizer

__all__ = ["load_gguf"]

TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
"""Control tokens that end a chat turn, in files that name only the end of a text as ``eos_token_id``."""


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def load_gguf(fields: Mapping[str, Any], source: str) -> SubwordTokenizer:
    """See `Tokenizer.from_gguf`."""
    prefix = "tokenizer.ggml."

    def get(name: str, kind: type | tuple[type, ...]) -> Any:
        value = fields.get(prefix + name)
        if value is not None and not isinstance(value, kind):
            raise ModelError(f"{source}: {prefix}{name} is {value!r:.80}, which is of the wrong type")
        return value

    model = get("model", str)
    tokens = get("tokens", list)
    if not tokens:
        raise ModelError(f"{source}: expected the tokenizer's tokens in {prefix}tokens")
    types = get("token_type", list) or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{source}: {len(types)} entries in {prefix}token_type, expected {len(tokens)}")
    bos, eos, eot = (get(f"{name}_token_id", int) for name in ("bos", "eos", "eot"))
    for name, i in (("bos", bos), ("eos", eos), ("eot", eot)):
        if i is not None and not 0 <= i < len(tokens):
            raise ModelError(f"{source}: {prefix}{name}_token_id is {i}, expected less than {len(tokens)}")

    add_bos = get("add_bos_token", bool)
    try:
        if model == "gpt2":
            pre = _pretokenizer(get("pre", str), source)
            backend = _byte_level(tokens, get("merges", list), pre, source)
            add_bos = pre.add_bos if add_bos is None else add_bos
        elif model == "llama":
            scores, merges = get("scores", list), get("merges", list)
            add_space = get("add_space_prefix", bool)
            backend = _sentencepiece(tokens, types, scores, merges, add_space is not False, source)
            add_bos = True if add_bos is None else add_bos
        else:
            raise ModelError(f"{source}: {prefix}model is {model!r}, expected 'gpt2' or 'llama'")
    except ModelError:
        raise
    except Exception as error:  # `tokenizers` raises plain `Exception`, as for a merge of unknown tokens
        raise ModelError(f"{source}: the tokenizer's metadata does not fit together: {error}") from error

    whole = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    # Longest match first is what both this library and llama.cpp do, so the order here says nothing.
    backend.add_tokens(
        [
            AddedToken(token, special=whole[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in whole and token
        ]
    )
    _add_bos_eos(backend, tokens, bos if add_bos else None, eos if get("add_eos_token", bool) else None)

    turn_ends = [i for i, token in enumerate(tokens) if token in TURN_ENDS and types[i] == TokenType.CONTROL]
    return SubwordTokenizer(
        backend,
        tokens,
        source=source,
        bos_token_id=bos,
        eos_token_ids=[i for i in (eos, eot, *turn_ends) if i is not None],
    )


def _pretokenizer(name: str | None, source: str) -> Pretokenizer:
    # A file without the key, or whose converter did not know the rule, gets GPT-2's, as in transformers.
    pre = PRETOKENIZERS.get(name or "default")
    if pre is None:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre is {name!r}, which is not known; known: {', '.join(sorted(PRETOKENIZERS))}"
        )
    return pre


def _byte_level(tokens: list[str], merges: list[str] | None, pre: Pretokenizer, source: str) -> tokenizers.Tokenizer:
    """Byte-level BPE: text is split by the pre-tokenizer's rule, then merged in the order of the merges."""
    if merges is None:
        raise ModelError(f"{source}: expected the tokenizer's merges in tokenizer.ggml.merges")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_pairs(merges, tokens, source), ignore_merges=pre.ignore_merges)
    )
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokens: list[str],
    types: list[int],
    scores: list[float] | None,
    merges: list[str] | None,
    add_space: bool,
    source: str,
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: the pair whose union scores best is merged first; what is in no token goes byte by byte."""
    vocab = {token: i for i, token in enumerate(tokens)}
    if merges is not None:
        pairs = _pairs(merges, tokens, source)
    elif scores is not None and len(scores) == len(tokens):
        pairs = _merges_from_scores(tokens, types, scores)
    else:
        raise ModelError(f"{source}: expected {len(tokens)} scores in tokenizer.ggml.scores, or merges")
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=pairs,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # A space goes before the text, and before the text after each special token, as in llama.cpp and in the first
    # Llama tokenizers of Hugging Face.
    space = [normalizers.Prepend("▁")] if add_space else []
    backend.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _add_bos_eos(backend: tokenizers.Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    """Let ``encode`` put these tokens before and after a text; None puts nothing."""
    around = [(tokens[i], i) for i in (bos, eos) if i is not None]
    # By number, for a template is split at spaces and colons, which a token may hold.
    names = {i: f"[{i}]" for _, i in around}
    template = [names[bos]] if bos is not None else []
    template.append("$A")
    template += [names[eos]] if eos is not None else []
    backend.post_processor = processors.TemplateProcessing(
        single=template,
        pair=[*template, *(part.replace("$A", "$B:1") for part in template)],
        special_tokens=[{"id": names[i], "ids": [i], "tokens": [token]} for token, i in dict.fromkeys(around)],
    )


def _pairs(merges: list[str], tokens: list[str], source: str) -> list[tuple[str, str]]:
    """The two tokens of each merge: the strings of ``tokens``, for others would take several MB once more."""
    own = {token: token for token in tokens}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise ModelError(f"{source}: {merge!r} in tokenizer.ggml.merges, expected two tokens and a space")
        pairs.append((own.get(left, left), own.get(right, right)))
    return pairs


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best score first.

    SentencePiece merges by the score of the result, so all pairs with one result are equals to it: their order among
    themselves would only count where they overlap, which takes a periodic text that is merged from both ends.
    """
    plain = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == TokenType.NORMAL}
    ranked = sorted(plain, key=lambda token: (-scores[plain[token]], plain[token]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
