"""`Pretokenizer`: how byte-level BPE splits text before merging, by the name that GGUF files give it."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

__all__ = ["PRETOKENIZERS", "Pretokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretokenizer:
    """What a ``tokenizer.ggml.pre`` stands for.

    :ivar build: makes the pre-tokenizer of the `tokenizers` library.
    :ivar normalizer: applied to the text before. GGUF does not say; it is that of the model's own tokenizer.
    :ivar ignore_merges: a word that is a token is taken as that token, whatever the merges would make of it.
    :ivar add_bos: BOS goes before a text where the file does not say.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# The parts of the rules that the models publish in their tokenizer.json.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)

_llama3 = Pretokenizer(build=_split(_LLAMA3), ignore_merges=True, add_bos=True)
_plain_llama3 = Pretokenizer(build=_split(_LLAMA3))
_qwen2 = Pretokenizer(build=_split(_QWEN2), normalizer=normalizers.NFC())
_gpt2_rule = Pretokenizer(build=_gpt2)
_digits_rule = Pretokenizer(build=_digits)

PRETOKENIZERS: dict[str, Pretokenizer] = {
    "default": _gpt2_rule,
    "gpt-2": _gpt2_rule,
    "gpt2": _gpt2_rule,
    "mpt": _gpt2_rule,
    "olmo": _gpt2_rule,
    "smollm": _digits_rule,
    "starcoder": _digits_rule,
    "refact": _digits_rule,
    "command-r": _digits_rule,
    "codeshell": _digits_rule,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "falcon3": _llama3,
    "pixtral": _llama3,
    "dbrx": _plain_llama3,
    "smaug-bpe": _plain_llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "tekken": Pretokenizer(build=_split(_TEKKEN), ignore_merges=True, add_bos=True),
}
"""Those of Llama, Mistral, Qwen and models built like them."""
