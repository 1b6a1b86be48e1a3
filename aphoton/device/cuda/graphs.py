"""Steps as CUDA graphs: `DecodeGraphs`, by rows, and `PieceGraphs`, what is between the attentions of a prefill."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from aphoton.device.cuda.streams import ALLOCATOR

__all__ = ["DecodeGraphs", "PieceGraphs", "buckets", "token_buckets"]


Pool = Any
"""Memory that graphs share, of `torch.cuda.graph_pool_handle`."""


def buckets(max_rows: int) -> list[int]:
    """Batch sizes that graphs are captured for: close together where steps are short, and ``max_rows`` itself.

    A step takes the next larger one and fills it up with padding rows.
    """
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32), *range(576, 4097, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def token_buckets(most: int) -> list[int]:
    """Token counts for which the pieces of steps with prompts are captured, up to ``most`` or a little more.

    Longer steps keep the device busy for longer than it takes to enqueue their kernels one by one.
    """
    sizes = [16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2304]
    return [size for index, size in enumerate(sizes) if index == 0 or sizes[index - 1] < most]


def _capture(enqueue: Callable[[], object], pool: Pool) -> torch.cuda.CUDAGraph:
    """What ``enqueue`` enqueues on the current stream, as a graph.

    Not by ``torch.cuda.graph``, which gives all free memory back to the driver each time.
    """
    graph = torch.cuda.CUDAGraph()
    with ALLOCATOR:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            enqueue()
        finally:
            graph.capture_end()
    return graph


class DecodeGraphs:
    """Captured decode steps, or their late sampling. Replaying is a single call, whatever the number of kernels.

    All share one memory pool, as they run one after the other on one stream.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        capture: Callable[[int, int], None],
        pool: Pool,
        progress: Callable[[int, int], None],
    ) -> None:
        """Capture all graphs, on the current stream.

        :param capture: (slot, size): enqueues the work, which reads from fixed places and writes to fixed places.
        :param progress: called with how many are done, of how many.
        """
        self.sizes = sorted(sizes)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        total = 2 * len(self.sizes)
        # The largest first: the others find their memory in the pool.
        for size in reversed(self.sizes):
            for slot in (0, 1):
                capture(slot, size)  # once outside: kernels are compiled and libraries set up
                self._graphs[slot, size] = _capture(partial(capture, slot, size), pool)
                progress(len(self._graphs), total)

    def size(self, rows: int) -> int:
        """The smallest captured batch size that holds ``rows``."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def replay(self, slot: int, size: int) -> None:
        """Enqueue the work."""
        self._graphs[slot, size].replay()


class PieceGraphs:
    """The pieces of mixed steps, captured: for each number of tokens, what comes before and between attentions.

    A step takes the next larger number and fills it up with tokens of the padding row. Attention itself is not in
    them, as its plan is the host's.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        pieces: int,
        capture: Callable[[int, int], None],
        pool: Pool,
        progress: Callable[[int, int], None],
    ) -> None:
        """Capture all graphs, on the current stream.

        :param capture: (size, piece): enqueues the piece of a step of so many tokens, on fixed places.
        """
        self.sizes = sorted(sizes)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        for number, size in enumerate(reversed(self.sizes)):
            for piece in range(pieces):
                capture(size, piece)
                self._graphs[size, piece] = _capture(partial(capture, size, piece), pool)
            progress(number + 1, len(self.sizes))

    def size(self, tokens: int) -> int | None:
        """The smallest captured number that holds ``tokens``; None when they are too many."""
        index = bisect_left(self.sizes, tokens)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, size: int, piece: int) -> None:
        """Enqueue a piece."""
        self._graphs[size, piece].replay()
