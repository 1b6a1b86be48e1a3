"""`Request`: what a user asked, from its sequences' tokens to pieces and a completion."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from aphoton.choice import Choice
from aphoton.completion import Completion, Piece, Timings, Usage
from aphoton.errors import AphotonError, DeadlineExceeded
from aphoton.scheduler import Sequence
from aphoton.turnstile import Turnstile

__all__ = ["Request"]

ENDING = 4
"""Pieces that a consumer takes in the time that its end takes it: there is the completion to make."""


class Request:
    """The choices of one prompt, which a consumer takes as they come, and which end together if one of them fails.

    :ivar choices: one, or ``n``, in the order of their indices.
    :ivar ended: the last terminal piece, or an error, has been taken: nothing more will come.
    """

    def __init__(
        self,
        choices: list[Choice],
        end: Callable[[Sequence, Exception], None],
        turnstile: Turnstile,
        *,
        deadline: float | None,
    ) -> None:
        """:param end: ends a sequence that has not ended, wherever it is, with an error.
        :param turnstile: through which consumers pass who have awaited something: what they weigh is in pieces.
        :param deadline: seconds that the request was given; see `expire_at`.
        """
        self.choices = choices
        self.ended = False
        self._first = choices[0]
        self._alone = len(choices) == 1
        self._end = end
        self._turnstile = turnstile
        self._turn = 0  # of the choice whose pieces are looked for first
        self._left = len(choices)  # that have not ended
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._called = False  # the waiter has been, or will be in its turn
        self._hears = False  # of its tokens, and not of its end only
        self._loop = asyncio.get_running_loop()
        if self._alone and deadline is None:
            self._first.sequence.on_end = partial(self._wake, ENDING)
        else:
            for choice in choices:
                choice.sequence.on_end = partial(self._count_end, choice.sequence)

    @property
    def finalized(self) -> bool:
        """All of its sequences have ended."""
        if self._alone:
            return self._first.sequence.finalized
        return all(choice.sequence.finalized for choice in self.choices)

    def expire_at(self, when: float) -> None:
        """End it with `DeadlineExceeded` at ``when`` on the loop's clock, if it has not ended by then."""
        if self._left:
            self._timer = self._loop.call_at(when, self._expire)

    def take(self) -> Piece | None:
        """What has come of one choice since it was last asked; None when nothing has.

        Choices take turns, from the one behind that of the last piece.

        :raises Exception: a sequence's error, once all that came before it has been taken.
        """
        if self._waiter is not None:
            self._refuse_second()
        if self._alone:
            first = self._first
            piece = first.take()
            if piece is None and first.sequence.error is not None:
                self.ended = True
                raise first.sequence.error
            self.ended = first.ended
            return piece
        choices = self.choices
        for choice in (*choices[self._turn :], *choices[: self._turn]):
            piece = choice.take()
            if piece is not None:
                self._turn = (choice.index + 1) % len(choices)
                self.ended = piece.finish_reason is not None and all(one.ended for one in choices)
                return piece
        error = self._error
        if error is not None and self.finalized:
            self.ended = True
            raise error
        return None

    def completion(self) -> Completion:
        """The whole request, whose sequences have all ended.

        :raises Exception: a sequence's error.
        """
        while not self.ended:
            self.take()
        if self._error is not None:
            raise self._error
        first = self._first.sequence
        usage = Usage(
            prompt_tokens=len(first.prompt),
            completion_tokens=sum(len(choice.sequence.output) for choice in self.choices),
            cached_tokens=first.cached,
        )
        return Completion(
            outputs=tuple([choice.output() for choice in self.choices]),
            usage=usage,
            timings=self._timings(),
            prompt_logprobs=self._first.prompt_logprobs,
        )

    def waiter(self, *, tokens: bool) -> asyncio.Future[None] | None:
        """What to await, once, until all have ended or, if ``tokens``, there may be something to take; None when that
        is so. Whoever has awaited it, to whatever end, calls `waited`.

        As few calls as can be: this runs for every piece.

        :raises AphotonError: on another event loop, or while another task waits.
        """
        first = self._first
        if self._alone:
            sequence = first.sequence
            if sequence.finished_at is not None or (tokens and first.taken < len(sequence.output)):
                return None
        elif self.finalized or (tokens and any(choice.news for choice in self.choices)):
            return None
        if asyncio.get_running_loop() is not self._loop:
            raise AphotonError("this stream belongs to the event loop that it was started on")
        if self._waiter is not None:
            self._refuse_second()
        waiter = self._waiter = self._loop.create_future()
        self._called = False
        if tokens is not self._hears:
            self._hears = tokens
            for choice in self.choices:
                if choice.sequence.finished_at is None:  # else nobody clears what would hold its consumer
                    choice.sequence.on_tokens = self._wake if tokens else None
        return waiter

    def waited(self) -> None:
        """Nobody awaits the `waiter` any more."""
        self._waiter = None

    @property
    def _error(self) -> Exception | None:
        """The error of one, and so of all."""
        if self._alone:
            return self._first.sequence.error
        return next((one.sequence.error for one in self.choices if one.sequence.error is not None), None)

    def _refuse_second(self) -> NoReturn:
        """Another task waits, for what this one would take from it."""
        raise AphotonError("this stream is being read by another task: one task reads a stream")

    def _wake(self, weight: int = 1) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if not self._called:
            self._called = True
            self._turnstile.call(waiter, weight)
        elif weight > 1:
            self._turnstile.weigh(waiter, weight)

    # Ends that concern others

    def _count_end(self, sequence: Sequence) -> None:
        """In the midst of a tick, most often: others are ended in a turn of their own."""
        self._left -= 1
        if not self._left and self._timer is not None:
            self._timer.cancel()
        if self._left and sequence.error is not None:
            self._loop.call_soon(self._end_rest, sequence.error)
        self._wake(ENDING)

    def _expire(self) -> None:
        self._end_rest(DeadlineExceeded(f"the request has not ended within its deadline of {self._deadline:g} seconds"))

    def _end_rest(self, error: Exception) -> None:
        for choice in self.choices:
            if not choice.sequence.finalized:
                self._end(choice.sequence, error)

    def _timings(self) -> Timings:
        """From its first token to its last, whichever choice they are of."""
        sequences = [choice.sequence for choice in self.choices]
        begin = sequences[0].submitted_at
        ends = [s.finished_at for s in sequences if s.finished_at is not None]
        admitted = [s.admitted_at for s in sequences if s.admitted_at is not None]
        first = [s.first_token_at for s in sequences if s.first_token_at is not None]
        spans = [
            (s.finished_at - s.first_token_at, len(s.output) - 1)
            for s in sequences
            if s.first_token_at is not None and s.finished_at is not None and len(s.output) > 1
        ]
        return Timings(
            queued=min(admitted, default=max(ends)) - begin,
            ttft=min(first) - begin if first else None,
            total=max(ends) - begin,
            itl=sum(seconds for seconds, _ in spans) / sum(gaps for _, gaps in spans) if spans else None,
        )
