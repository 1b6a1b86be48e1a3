"""Steps as CUDA graphs: `DecodeGraphs`, whole ones, and `PieceGraphs`, what is between the attentions of a prefill."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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


class DecodeGraphs:
    """Captured steps. Replaying one is a single call, whatever the number of its kernels.

    All share one memory pool: they run one after the other on one stream, so that what one leaves in it, its logits
    too, is there until the next is replayed.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        capture: Callable[[int, int], Tensor],
        stream: torch.cuda.Stream,
        pool: Pool,
        progress: Callable[[int, int], None],
    ) -> None:
        """Capture all graphs. The stream must be this thread's current one.

        :param capture: (slot, size) -> [size, V] logits: enqueues the step, which reads from fixed places.
        :param progress: called with how many are done, of how many.
        """
        self.sizes = sorted(sizes)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        total = 2 * len(self.sizes)
        # The largest first: the others find their memory in the pool.
        for size in reversed(self.sizes):
            for slot in (0, 1):
                capture(slot, size)  # once outside: kernels are compiled and libraries set up
                graph = torch.cuda.CUDAGraph()
                # Other threads of the program may use the device meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    logits = capture(slot, size)
                self._graphs[slot, size] = graph, logits
                progress(len(self._graphs), total)

    def size(self, rows: int) -> int:
        """The smallest captured batch size that holds ``rows``."""
        return next(size for size in self.sizes if size >= rows)

    def replay(self, slot: int, size: int) -> Tensor:
        """Enqueue the step; its logits, until the next graph is replayed."""
        graph, logits = self._graphs[slot, size]
        graph.replay()
        return logits


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
        stream: torch.cuda.Stream,
        pool: Pool,
        progress: Callable[[int, int], None],
    ) -> None:
        """Capture all graphs. The stream must be this thread's current one.

        :param capture: (size, piece): enqueues the piece of a step of so many tokens, on fixed places.
        """
        self.sizes = sorted(sizes)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        for number, size in enumerate(reversed(self.sizes)):
            for piece in range(pieces):
                capture(size, piece)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    capture(size, piece)
                self._graphs[size, piece] = graph
            progress(number + 1, len(self.sizes))

    def size(self, tokens: int) -> int | None:
        """The smallest captured number that holds ``tokens``; None when they are too many."""
        return next((size for size in self.sizes if size >= tokens), None)

    def replay(self, size: int, piece: int) -> None:
        """Enqueue a piece."""
        self._graphs[size, piece].replay()
