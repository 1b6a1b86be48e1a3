"""`SubwordTokenizer`: byte-level and SentencePiece BPE, on the `tokenizers` library."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import starmap

import msgspec
import tokenizers
from tokenizers import AddedToken, normalizers

from aphoton.text.quotation import Quotation
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
        special = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        literal = backend.normalizer is None or not any(token.normalized for token in special.values())
        ends = tuple(eos_token_ids)
        # A decoder says what it does only in its pickled form, which is that of tokenizer.json.
        decoder = backend.decoder and msgspec.json.decode(backend.decoder.__getstate__())
        super().__init__(
            Vocabulary.from_tokens(tokens, special, decoder, source=source),
            bos_token="" if bos_token_id is None else tokens[bos_token_id],
            bos_token_id=bos_token_id,
            eos_token=tokens[ends[0]] if ends else "",
            eos_token_ids=ends,
            quotation=Quotation((token.content for token in special.values()), literal=literal),
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
        own = [] if self._backend.normalizer is None else [self._backend.normalizer]
        taking_back = starmap(normalizers.Replace, self.quotation.pairs)
        backend = self._copy()
        backend.normalizer = normalizers.Sequence([*taking_back, *own])
        return backend

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to special tokens in the text. (The switch is one for all threads: a copy.)"""
        backend = self._copy()
        backend.encode_special_tokens = True
        return backend

    def _copy(self) -> tokenizers.Tokenizer:
        """The same tokenizer, over the same model: to read a vocabulary again takes long, and holds the interpreter."""
        backend = tokenizers.Tokenizer(self._backend.model)
        backend.normalizer = self._backend.normalizer
        backend.pre_tokenizer = self._backend.pre_tokenizer
        backend.post_processor = self._backend.post_processor
        added = self._backend.get_added_tokens_decoder()
        backend.add_tokens(
            [
                AddedToken(
                    token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    # A special token is never searched for in what the normalizer has made.
                    normalized=token.normalized and not token.special,
                    special=token.special,
                )
                for _, token in sorted(added.items())
            ]
        )
        return backend
