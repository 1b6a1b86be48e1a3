"""`Progress`: how a long start says how far it is."""

from collections.abc import Callable

__all__ = ["Progress"]

Progress = Callable[[str, int, int | None], None]
"""Called now and then, from the thread that loads: with what is being done, and how much of how much, if that is known:
bytes of what is "Fetching ..." or "Unpacking ...", a count of anything else ("Capturing CUDA graphs ...")."""
