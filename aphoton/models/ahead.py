"""`ahead`: a function over items, computed a little ahead in threads."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

__all__ = ["ahead"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """``function`` of each item, in order, as many at a time as the machine has processors (16 at most), and in memory
    no more than these and the one that is given out.

    For work that holds no interpreter lock, as numpy's and torch's. Leaving the iterator early drops what is pending.
    """
    workers = min(os.cpu_count() or 1, 16)
    remaining = iter(items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="aphoton-load")
    try:
        pending: deque[Future[Result]] = deque(pool.submit(function, item) for item in islice(remaining, workers))
        while pending:
            results = [pending.popleft().result()]
            for item in islice(remaining, 1):
                pending.append(pool.submit(function, item))
            yield results.pop()  # held by nobody but the caller: a tensor may be gigabytes
    finally:
        pool.shutdown(cancel_futures=True)
