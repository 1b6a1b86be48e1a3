"""`Step`: one launched forward."""

from dataclasses import dataclass

from aphoton.device.base import Batch
from aphoton.scheduler.sequence import Sequence
from aphoton.scheduler.slot import Slot

__all__ = ["Step"]


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A forward in flight, from its launch to its commit.

    :ivar number: from 1, in launch order.
    :ivar sequences: those of ``batch.rows``, in the same order. Each counts this step in its in-flight references.
    """

    number: int
    slot: Slot
    batch: Batch
    sequences: list[Sequence]

    @property
    def rows(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> int:
        return len(self.batch.tokens)

    @property
    def prompts(self) -> bool:
        """It feeds prompts, or parts of them."""
        return bool(self.batch.admitted) or self.tokens > self.rows
