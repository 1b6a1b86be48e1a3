"""`frozen_heap`: the garbage collector looks no more at what has been loaded, and takes little time at a time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]

MIDDLE, OLD = 2, 40
"""Collections of the youngest objects, after which those that are left of them are collected too; and such ones, after
which all are. Python's numbers are 10 and 10: then the former are so many that it takes 2 ms, which each stream waits
for. The latter take as long, and come as often as they do there."""


@contextmanager
def frozen_heap() -> Iterator[None]:
    """For a program whose loop must stay live, once all is loaded.

    A full collection goes through all objects that there are, most of which are the libraries' and never garbage: with
    torch and transformers in a process it stops every stream for 70 to 180 ms. At the end, what was frozen may be
    collected again.
    """
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    if sys.version_info < (3, 14):  # from there on old objects are collected in parts, and the numbers mean others
        gc.set_threshold(thresholds[0], MIDDLE, OLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
