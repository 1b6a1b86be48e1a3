"""`LogitsProcessor`: a request's own change to its logits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from aphoton.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogitsProcessor", "process", "processor_error"]


def process(processor: "LogitsProcessor", output: Sequence[int], logits: "Tensor") -> None:
    """Let ``processor`` change ``logits``.

    :raises InvalidRequest: when it returns something else, as other libraries' do: that would change nothing.
    """
    returned: object = processor(output, logits)  # type: ignore[func-returns-value]  # the type says None; users may not
    if returned is not None and returned is not logits:  # which is what torch's own functions in place return
        raise InvalidRequest(
            "processor", f"must change the logits in place and return None, not {type(returned).__name__}"
        )


def processor_error(error: BaseException) -> Exception:
    """What a processor raised, as its request ends with it.

    Raised in the caller's task, a cancellation or an exit would be taken for its own, an iteration's end for a
    stream's.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = RuntimeError(f"the processor raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


class LogitsProcessor(Protocol):
    """Called once per token, between the commit of the last one and the sampling of the next."""

    def __call__(self, output: Sequence[int], logits: "Tensor") -> None:
        """Change ``logits`` in place: their values only. They are a part of what all rows have: to resize them, to let
        them have other memory, or to write beyond them, changes other requests' tokens or ends the process.

        What it does is enqueued behind the forward, on the device's own stream: it must not read a value back
        (``.item()``, ``.cpu()``), which would wait for the device. On the CPU device it runs in the worker thread. What
        it raises ends its request with that error. An ``async`` function is refused.

        :param output: token ids of the request's output so far; a copy.
        :param logits: [vocab_size] on the device, of this row alone: float32 or the model's own dtype.
        """
