"""`Request`: what a user asked, from its sequence's tokens to pieces and a completion."""

import asyncio
from collections.abc import Sequence as Many

from aphoton.completion import Completion, Output, Piece, Timings, Usage
from aphoton.errors import AphotonError
from aphoton.sampling import SamplingParams
from aphoton.scheduler import Sequence
from aphoton.text import Detokenizer, StopStrings, Tokenizer

__all__ = ["Request"]


class Request:
    """One sequence and the text of it, as far as its consumer has come.

    Text is made in the consumer's turn, once for all tokens since the last. Only a request with stop strings is
    detokenized token by token in the tick, because its text decides when it ends.
    """

    def __init__(self, sequence: Sequence, params: SamplingParams, tokenizer: Tokenizer, *, continues: bool) -> None:
        """:param continues: the text goes on behind a prompt's, so that a leading space belongs to it."""
        self.sequence = sequence
        self.params = params
        self._detokenizer = Detokenizer(tokenizer, continues=continues)
        self._stops: StopStrings | None = None
        if params.stop_strings:
            self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
            sequence.watch = self._watch
        self._watched = ""  # text that `_watch` has made and no piece has carried
        self._taken = 0  # tokens that pieces have carried
        self._text: list[str] = []
        self._ended = False  # the terminal piece has been taken
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        sequence.on_end = self._wake

    @property
    def ended(self) -> bool:
        """The terminal piece has been taken: nothing more will come."""
        return self._ended

    def take(self) -> Piece | None:
        """What has come since the last call; None when nothing has.

        :raises Exception: the sequence's error, once all that came before it has been taken.
        """
        self._refuse_second()
        sequence = self.sequence
        tokens = sequence.output[self._taken :]
        if self._ended or (not tokens and not sequence.finalized):
            return None
        if not tokens and sequence.error is not None:
            self._ended = True
            raise sequence.error
        begin, self._taken = self._taken, self._taken + len(tokens)
        last = sequence.finalized and sequence.error is None
        text = self._show(tokens, last=last)
        self._text.append(text)
        self._ended = last
        return Piece(
            index=0,
            text=text,
            token_ids=tuple(tokens),
            finish_reason=sequence.finish_reason if last else None,
            logprobs=None if self.params.logprobs is None else tuple(sequence.logprobs[begin : self._taken]),
        )

    def completion(self) -> Completion:
        """The whole request, which has ended.

        :raises Exception: the sequence's error.
        """
        while not self._ended:
            self.take()
        sequence = self.sequence
        if sequence.error is not None:
            raise sequence.error
        assert sequence.finish_reason is not None
        output = Output(
            index=0,
            text="".join(self._text),
            token_ids=tuple(sequence.output),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=None if self.params.logprobs is None else tuple(sequence.logprobs),
        )
        usage = Usage(prompt_tokens=len(sequence.prompt), completion_tokens=len(sequence.output))
        return Completion(outputs=(output,), usage=usage, timings=self._timings())

    async def wait(self, *, tokens: bool) -> None:
        """Wait for the end or, if ``tokens``, for the next token."""
        if self.sequence.finalized or (tokens and self._taken < len(self.sequence.output)):
            return
        if asyncio.get_running_loop() is not self._loop:
            raise AphotonError("this stream belongs to the event loop that it was started on")
        self._refuse_second()
        self._waiter = self._loop.create_future()
        if tokens:
            self.sequence.on_tokens = self._wake
        try:
            await self._waiter
        finally:
            self._waiter = None
            self.sequence.on_tokens = None

    def _refuse_second(self) -> None:
        """:raises AphotonError: while another task waits, for what this one would take from it."""
        if self._waiter is not None:
            raise AphotonError("this stream is being read by another task: one task reads a stream")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _watch(self, token: int) -> str | None:
        """In the tick: the text of ``token``, and the stop string that it completes."""
        assert self._stops is not None
        text = self._detokenizer.push((token,))
        if len(self.sequence.output) < self.params.min_tokens:
            self._watched += text
            return None
        self._watched += self._stops.push(text)
        return self._stops.hit

    def _show(self, tokens: Many[int], *, last: bool) -> str:
        """The text of ``tokens`` that can be shown; all of it when they are the last."""
        stop_reason = self.sequence.stop_reason
        if self._stops is not None:
            text, self._watched = self._watched, ""
            if last and not isinstance(stop_reason, str):
                text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
            return text
        if last and isinstance(stop_reason, int):
            tokens = tokens[:-1]  # an end token has no text
        text = self._detokenizer.push(tokens)
        return text + self._detokenizer.finish() if last else text

    def _timings(self) -> Timings:
        sequence = self.sequence
        begin, first, end = sequence.submitted_at, sequence.first_token_at, sequence.finished_at
        assert end is not None
        admitted = end if sequence.admitted_at is None else sequence.admitted_at
        many = len(sequence.output)
        return Timings(
            queued=admitted - begin,
            ttft=None if first is None else first - begin,
            total=end - begin,
            itl=None if first is None or many < 2 else (end - first) / (many - 1),
        )
