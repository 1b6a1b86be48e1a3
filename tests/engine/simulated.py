"""Simulated engines of which a test knows every token, and acts at exactly the moment that it means."""

from collections import Counter
from collections.abc import Callable

from aphoton import SimModel

EOS = 256
"""The end token of models that say a text; ids below are bytes."""


def saying(text: str, *, end: bool = True, probe: Callable[[str], None] | None = None) -> SimModel:
    """A model that answers any prompt of one token with ``text``, a byte a token, and then ends if ``end``, or begins
    again."""
    data = text.encode()

    def script(history: tuple[int, ...], seed: int, vocab_size: int) -> int:
        said = len(history) - 1
        return EOS if end and said >= len(data) else data[said % len(data)]

    return SimModel(script=script, vocab_size=300, eos_token_ids=(EOS,), probe=probe)


class Probe:
    """A `SimModel.probe` that counts the device's calls and acts at some of them.

    A tick is ``launch`` of step t+1, ``results`` of step t and ``sample`` of step t+1 (blocking: of the same step).

    :ivar calls: how many of each there have been, the one that begins included.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.every: Callable[[str], None] | None = None
        self._actions: dict[int, Callable[[], None]] = {}

    @property
    def total(self) -> int:
        return self.calls.total()

    def after(self, calls: int, action: Callable[[], None]) -> None:
        """Call ``action`` in the device's call after so many more."""
        self._actions[self.total + calls + 1] = action

    def __call__(self, call: str) -> None:
        self.calls[call] += 1
        if self.every is not None:
            self.every(call)
        action = self._actions.pop(self.total, None)
        if action is not None:
            action()
