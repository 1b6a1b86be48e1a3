"""`Choice`: one of a request's outputs, from its sequence's tokens to text."""

from collections.abc import Sequence as Many

from aphoton.completion import Output, Piece, TokenLogprob
from aphoton.parsing import Parsing
from aphoton.sampling import Grammar, SamplingParams
from aphoton.scheduler import Sequence
from aphoton.text import Detokenizer, StopStrings, Tokenizer

__all__ = ["Choice"]

Logprobs = tuple[TokenLogprob | None, ...] | None


class Choice:
    """One sequence and the text of it, as far as its consumer has come.

    Text is made in the consumer's turn, once for all tokens since the last. Only one with stop strings is detokenized
    token by token in the tick, because its text decides when it ends.

    :ivar taken: tokens that pieces have carried.
    :ivar ended: the terminal piece has been taken: nothing more will come.
    """

    __slots__ = (
        "_begins",
        "_detokenizer",
        "_echo",
        "_grammar",
        "_scored",
        "_stops",
        "_text",
        "_watched",
        "ended",
        "index",
        "params",
        "sequence",
        "taken",
    )

    def __init__(
        self,
        index: int,
        sequence: Sequence,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        continues: bool,
        stops: StopStrings | None,
        echo: str | None,
        grammar: Grammar | None,
        scored: Sequence,
    ) -> None:
        """:param continues: the text goes on behind a prompt's, so that a leading space belongs to it.
        :param stops: the request's, of which this takes a fresh one.
        :param echo: the prompt's text, to be put before; None: it is not.
        :param grammar: what the text is of.
        :param scored: the request's sequence whose prompt is scored, for all: its first.
        """
        self.index = index
        self.sequence = sequence
        self.params = params
        self.ended = False
        self._detokenizer = Detokenizer(tokenizer, continues=continues)
        self._stops = None if stops is None else stops.fresh()
        if stops is not None:
            sequence.watch = self._watch
        self._watched = ""  # text that `_watch` has made and no piece has carried
        self.taken = 0
        self._text: list[str] = []  # of the pieces, what has been sampled only
        self._echo = echo
        self._grammar = grammar
        self._scored = scored
        # The next piece carries something of the prompt.
        self._begins = echo is not None or params.prompt_logprobs is not None

    @property
    def news(self) -> bool:
        """Whether `take` would return a piece."""
        sequence = self.sequence
        ends = sequence.finalized and not self.ended and sequence.error is None
        return (ends or self.taken < len(sequence.output)) and not (self._begins and self._early)

    def take(self) -> Piece | None:
        """What has come since the last call; None when nothing has, or nothing but an error."""
        sequence = self.sequence
        tokens = sequence.output[self.taken :]
        last = sequence.finished_at is not None and sequence.error is None
        if self.ended or not (tokens or last) or (self._begins and self._early):
            return None
        begin, self.taken = self.taken, self.taken + len(tokens)
        plain = not last and self._stops is None  # as nearly all pieces are
        text = self._detokenizer.push(tokens) if plain else self._show(tokens, last=last)
        self._text.append(text)
        self.ended = last
        logprobs = None if self.params.logprobs is None else tuple(sequence.logprobs.read()[begin : self.taken])
        if self._begins:
            return self._first_piece(text, tokens, logprobs, last=last)
        return Piece(
            index=self.index,
            text=text,
            token_ids=tuple(tokens),
            finish_reason=sequence.finish_reason if last else None,
            logprobs=logprobs,
        )

    def output(self) -> Output:
        """The whole of it, once `ended`."""
        sequence = self.sequence
        assert self.ended and sequence.finish_reason is not None
        tokens, text = tuple(sequence.output), "".join(self._text)
        logprobs: Logprobs = None if self.params.logprobs is None else tuple(sequence.logprobs.read())
        parsing: Parsing | None = None
        if self._grammar is not None and sequence.finish_reason == "stop":
            parsing = Parsing(self._grammar, text, sequence.complete)
        if self._echo is not None:
            text, tokens, logprobs = self._with_prompt(self._echo, text, tokens, logprobs)
        return Output(
            index=self.index,
            text=text,
            token_ids=tokens,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=logprobs,
            parsing=parsing,
        )

    @property
    def prompt_logprobs(self) -> Logprobs:
        """One for each token of the prompt, if the request asked: None for the first, and for those that it ended
        before."""
        wanted = self.params.prompt_logprobs
        return None if wanted is None or self.index else self._prompt_logprobs(wanted)

    @property
    def _early(self) -> bool:
        """Whether its first piece waits for log-probabilities of the prompt, which are the first sequence's to bring.

        That one's next token, or its end, comes with them or after them: whoever waits for news is woken then.
        """
        wanted = self._echo is not None and self.params.logprobs is not None
        return wanted and self._scored.unscored and not self._scored.finalized

    def _prompt_logprobs(self, top: int) -> tuple[TokenLogprob | None, ...]:
        sequence = self._scored
        # echo and prompt_logprobs may ask for different numbers of alternatives
        whole = sequence.prompt_logprobs == top
        scores = sequence.prompt_scores.read() if whole else sequence.prompt_scores.read_short(top)
        return (None, *scores, *[None] * (len(sequence.prompt) - 1 - len(scores)))

    def _first_piece(self, text: str, tokens: Many[int], logprobs: Logprobs, *, last: bool) -> Piece:
        self._begins = False
        if self._echo is not None:
            text, tokens, logprobs = self._with_prompt(self._echo, text, tuple(tokens), logprobs)
        return Piece(
            index=self.index,
            text=text,
            token_ids=tuple(tokens),
            finish_reason=self.sequence.finish_reason if last else None,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _with_prompt(
        self, prompt: str, text: str, tokens: tuple[int, ...], logprobs: Logprobs
    ) -> tuple[str, tuple[int, ...], Logprobs]:
        if logprobs is not None:
            assert self.params.logprobs is not None
            logprobs = self._prompt_logprobs(self.params.logprobs) + logprobs
        return prompt + text, (*self.sequence.prompt.tolist(), *tokens), logprobs

    def _watch(self, token: int) -> str | None:
        """In the tick: the text of ``token``, and the stop string that it completes."""
        assert self._stops is not None
        ends = len(self.sequence.output) >= self.params.min_tokens
        self._watched += self._stops.push(self._detokenizer.push((token,)), ends=ends)
        return self._stops.hit

    def _show(self, tokens: Many[int], *, last: bool) -> str:
        """The text of ``tokens`` that can be shown; all of it when they are the last."""
        stop_reason = self.sequence.stop_reason
        if self._stops is not None:
            text, self._watched = self._watched, ""
            if last and not isinstance(stop_reason, str):
                text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
                if self._stops.hit is not None and self.sequence.finish_reason != "abort":
                    # A character that was never completed shows as a mark only now, and completes a stop string.
                    self.sequence.finish_reason, self.sequence.stop_reason = "stop", self._stops.hit
            return text
        if last and isinstance(stop_reason, int):
            tokens = tokens[:-1]  # an end token has no text
        text = self._detokenizer.push(tokens)
        return text + self._detokenizer.finish() if last else text
