"""`LogitsProcessor`: a request's own change to its logits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogitsProcessor"]


class LogitsProcessor(Protocol):
    """Called once per token, between the commit of the last one and the sampling of the next."""

    def __call__(self, output: Sequence[int], logits: "Tensor") -> None:
        """Change ``logits`` in place.

        What it does is enqueued behind the forward, on the device's own stream: it must not read a value back
        (``.item()``, ``.cpu()``), which would wait for the device. On the CPU device it runs in the worker thread. What
        it raises ends its request with that error.

        :param output: token ids of the request's output so far; a copy.
        :param logits: [vocab_size] on the device, of this row alone: float32 or the model's own dtype.
        """
