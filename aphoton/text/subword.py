"""`SubwordTokenizer`: byte-level and SentencePiece BPE, on the `tokenizers` library."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import starmap

import msgspec
import tokenizers
from tokenizers import normalizers

from aphoton.text.tokenizer import Tokenizer, check_unicode
from aphoton.text.vocabulary import Vocabulary

__all__ = ["SubwordTokenizer"]


class SubwordTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` for encoding, and a table for decoding.

    :param backend: not changed after this.
    :param tokens: the spelling of every id.
    :param source: the file's name, for errors.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        tokens: Sequence[str],
        *,
        source: str,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        special = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
        ends = tuple(eos_token_ids)
        # A decoder says what it does only in its pickled form, which is that of tokenizer.json.
        decoder = backend.decoder and msgspec.json.decode(backend.decoder.__getstate__())
        super().__init__(
            Vocabulary.from_tokens(tokens, special, decoder, source=source),
            bos_token="" if bos_token_id is None else tokens[bos_token_id],
            bos_token_id=bos_token_id,
            eos_token=tokens[ends[0]] if ends else "",
            eos_token_ids=ends,
            specials=special.values(),
        )
        self._backend = backend

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        check_unicode(text)
        backend = self._backend if parse_special else self._literal
        # A batch of one, for `encode` holds the interpreter's lock until it is done (seconds for a long text) and
        # `encode_batch_fast` does not. It leaves out offsets, which nobody asks for.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_quoted(self, text: str) -> list[int]:
        check_unicode(text)
        return self._quoted.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _quoted(self) -> tokenizers.Tokenizer:
        """The same tokenizer, with stand-ins taken back behind the search for special tokens: a normalizer sees what
        is between those."""
        state = msgspec.json.decode(self._backend.to_str())
        for token in state["added_tokens"]:
            if token["special"]:
                token["normalized"] = False  # or it is searched for in what the normalizer has made
        backend = tokenizers.Tokenizer.from_str(msgspec.json.encode(state).decode())
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([*starmap(normalizers.Replace, self.quotation.pairs), *own])
        return backend

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to special tokens in the text. (The switch is one for all threads: a copy.)"""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend
