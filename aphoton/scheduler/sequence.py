"""`Sequence`: one stream of tokens."""

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

from aphoton.completion import FinishReason
from aphoton.sampling import LogitsProcessor, Masker, RowSampling
from aphoton.scheduler.logprobs import Logprobs

__all__ = ["Sequence"]


class Sequence:
    """A prompt and the tokens that have been committed behind it.

    Made by the engine, moved by the scheduler, read by whoever consumes it. A sequence ends once: ``finish_reason`` or
    ``error`` is set then, and no token comes after it, though a step that computes it may still be in flight.

    :ivar prompt: [p] int32 token ids, at least one.
    :ivar limit: tokens to generate at most, foreseen from the start. With 0 its prompt is computed, and that is all.
    :ivar sampling: the row's sampler state; its ``row`` is filled in at admission.
    :ivar stop_ids: token ids that end it.
    :ivar min_tokens: tokens before any end counts.
    :ivar watch: called with each token of a sequence that has stop strings; the string that it completes, or None.
    :ivar on_tokens: called when a token has come. Set only where somebody takes them as they come: it costs the tick
        time.
    :ivar on_end: called at the end.
    :ivar priority: lower goes first; among equals, whoever came first.
    :ivar masker: which tokens may come next, of a sequence that has rules.
    :ivar processor: changes the logits of each token.
    :ivar cacheable: its full pages are kept in the prefix cache, and it takes what is there.
    :ivar namespace: of its pages there: None for the one that all share; else those with an equal one (the siblings of
        one request) share among each other, and what it leaves is dropped when the last of them ends.
    :ivar prompt_logprobs: alternatives to report with the log-probabilities of the prompt's tokens; None: none of that.
    :ivar prompt_scores: one entry per prompt token but the first, as they come.
    :ivar cached: prompt tokens whose KV was there when it was first admitted.
    :ivar arrival: its number in the order of arrival.
    :ivar row: its place in the batch, 0 while it has none.
    :ivar complete: it ended where its rules, if it has any, or the model end it: no other stop, no limit has cut it.
    :ivar output: committed token ids.
    :ivar logprobs: one entry per output token, if asked for.
    """

    __slots__ = (
        "admitted_at",
        "arrival",
        "cacheable",
        "cached",
        "complete",
        "error",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "limit",
        "logprobs",
        "masker",
        "min_tokens",
        "namespace",
        "on_end",
        "on_tokens",
        "output",
        "priority",
        "processor",
        "prompt",
        "prompt_logprobs",
        "prompt_scores",
        "row",
        "sampling",
        "stop_ids",
        "stop_reason",
        "submitted_at",
        "watch",
    )

    def __init__(
        self,
        prompt: NDArray[np.int32],
        *,
        limit: int,
        sampling: RowSampling,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        watch: Callable[[int], str | None] | None = None,
        priority: int = 0,
        masker: Masker | None = None,
        processor: LogitsProcessor | None = None,
        cacheable: bool = True,
        namespace: Hashable = None,
        prompt_logprobs: int | None = None,
        submitted_at: float = 0.0,
    ) -> None:
        self.prompt = prompt
        self.limit = limit
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.min_tokens = min_tokens
        self.watch = watch
        self.priority = priority
        self.masker = masker
        self.processor = processor
        self.cacheable = cacheable
        self.namespace = namespace
        self.prompt_logprobs = prompt_logprobs
        self.on_tokens: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.arrival = 0
        self.row = 0
        self.cached = 0
        self.prompt_scores = Logprobs()
        self.output: list[int] = []
        self.logprobs = Logprobs()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.complete = False
        self.error: Exception | None = None
        self.submitted_at = submitted_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Lower goes first, and is preempted last."""
        return self.priority, self.arrival

    @property
    def known(self) -> NDArray[np.int32]:
        """Prompt and output: what is computed when it gets a row."""
        return np.concatenate((self.prompt, np.array(self.output, np.int32))) if self.output else self.prompt

    @property
    def unscored(self) -> bool:
        """Log-probabilities of its prompt are to come."""
        return self.prompt_logprobs is not None and len(self.prompt_scores) < len(self.prompt) - 1

    @property
    def finalized(self) -> bool:
        """It has ended: its result is out, though its pages may still be a step's."""
        return self.finished_at is not None
