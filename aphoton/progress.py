"""`Progress`: how a long fetch says how far it is."""

from collections.abc import Callable

__all__ = ["Progress"]

Progress = Callable[[str, int, int | None], None]
"""Called now and then, from the thread that fetches: with what is being done ("Fetching ..."), the bytes done, and the
bytes in all when that is known."""
