"""`DecodeGraphs`: decode steps as CUDA graphs, one for each slot and batch size."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["DecodeGraphs", "buckets"]


def buckets(max_rows: int) -> list[int]:
    """Batch sizes that graphs are captured for: close together where steps are short, and ``max_rows`` itself.

    A step takes the next larger one and fills it up with padding rows.
    """
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32), *range(576, 4097, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


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
        progress: Callable[[int, int], None],
    ) -> None:
        """Capture all graphs. The stream must be this thread's current one.

        :param capture: (slot, size) -> [size, V] logits: enqueues the step, which reads from fixed places.
        :param progress: called with how many are done, of how many.
        """
        self.sizes = sorted(sizes)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
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
