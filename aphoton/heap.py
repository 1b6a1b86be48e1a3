"""`frozen_heap`: the garbage collector looks no more at what has been loaded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """For a program whose loop must stay live, once all is loaded.

    A full collection goes through all objects that there are, most of which are the libraries' and never garbage: with
    torch and transformers in a process it stops every stream for 70 to 180 ms. At the end, what was frozen may be
    collected again.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
