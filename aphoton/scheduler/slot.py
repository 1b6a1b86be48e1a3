"""`Slot`: one of the two sets of step buffers."""

from typing import Literal

__all__ = ["Slot", "SlotError"]


class SlotError(RuntimeError):
    """A slot was used out of order: a fault of the pipeline itself."""


class Slot:
    """A set of step buffers that takes its turn: free, launched, sampled, free again once its results are read.

    That the device is done with a slot does not free it: its results are in the slot's buffers until somebody has
    read them.
    """

    __slots__ = ("index", "state")

    def __init__(self, index: int) -> None:
        self.index = index
        self.state: Literal["free", "launched", "sampled"] = "free"

    @property
    def free(self) -> bool:
        return self.state == "free"

    def launched(self) -> None:
        self._move("free", "launched")

    def sampled(self) -> None:
        self._move("launched", "sampled")

    def read(self) -> None:
        self._move("sampled", "free")

    def _move(self, old: Literal["free", "launched", "sampled"], new: Literal["free", "launched", "sampled"]) -> None:
        if self.state != old:
            raise SlotError(f"slot {self.index} is {self.state} and cannot become {new}")
        self.state = new
