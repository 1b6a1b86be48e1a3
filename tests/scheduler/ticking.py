"""A scheduler driven by hand, without a device: every token is the same."""

from collections import deque
from typing import Any

import numpy as np

from aphoton.device.base import Batch, Limits, Results, Scores
from aphoton.sampling import RowSampling
from aphoton.scheduler import Scheduler, Sequence
from aphoton.scheduler.slot import Slot
from aphoton.scheduler.step import Step

PAGE = 4
TOKEN = 7


class Ticking:
    """:ivar launched: the batches so far, each with its sequences."""

    def __init__(
        self, *, rows: int = 4, pages: int = 1000, step: int = 64, prefix_cache: bool = True, ends: tuple[int, ...] = ()
    ) -> None:
        limits = Limits(vocab_size=1000, max_model_len=4000, pages=pages + 1, eos_token_ids=ends)
        self.scheduler = Scheduler(
            limits,
            max_rows=rows,
            page_size=PAGE,
            max_step_tokens=step,
            now=lambda: 0.0,
            prefix_cache=prefix_cache,
            check=True,
        )
        self.launched: list[tuple[Batch, list[Sequence]]] = []
        self._inflight: deque[Step] = deque()

    def add(self, prompt: "list[int] | range", limit: int = 1000, **fields: Any) -> Sequence:
        sequence = Sequence(np.array(prompt, np.int32), limit=limit, sampling=RowSampling(seed=0), **fields)
        self.scheduler.add(sequence)
        return sequence

    def launch(self) -> dict[Sequence, int]:
        """Launch a step; the tokens that it feeds for each of its sequences."""
        chosen = self.scheduler.next_batch()
        if chosen is None:
            return {}
        batch, sequences = chosen
        self.launched.append(chosen)
        self._inflight.append(Step(number=len(self.launched), slot=Slot(0), batch=batch, sequences=sequences))
        return dict(zip(sequences, batch.lengths.tolist(), strict=True))

    @property
    def newest(self) -> Step:
        """The step launched last, which is in flight."""
        return self._inflight[-1]

    def commit(self, token: int = TOKEN, **fields: Any) -> None:
        """Commit the oldest step in flight."""
        step = self._inflight.popleft()
        scores = [
            Scores(
                index=scored.index,
                logprobs=-scored.targets.astype(np.float32),
                top_ids=np.tile(np.arange(5, dtype=np.int32), (len(scored.targets), 1)),
                top_logprobs=np.zeros((len(scored.targets), 5), np.float32),
            )
            for scored in step.batch.scored
        ]
        tokens = np.full(len(step.sequences), token, np.int32)
        self.scheduler.commit(step, Results(tokens=tokens, began=0.0, ended=0.0, scores=scores, **fields))

    def tick(self, **fields: Any) -> dict[Sequence, int]:
        """A step, launched and committed, with no other in flight."""
        fed = self.launch()
        if fed:
            self.commit(**fields)
        return fed

    def to_the_end(self) -> list[dict[Sequence, int]]:
        """Tick until nobody is there; what each step fed."""
        steps = []
        while not self.scheduler.idle:
            steps.append(self.tick())
            assert steps[-1], "somebody runs"
        self.scheduler.check_idle()
        return steps
