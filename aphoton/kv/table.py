"""`PageTable`: which pages each row has, on the host, and what the device has not been told yet."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageTable"]


class PageTable:
    """The pages of each row, in the order of the tokens in them, and a list of changes for the next launch.

    The device keeps a copy of its own, so a launch sends only what changed. What stands behind a row's last page is
    left over from earlier sequences; nobody reads it.
    """

    def __init__(self) -> None:
        self._pages: dict[int, list[int]] = {}
        self._changes: list[tuple[int, int, int]] = []

    def append(self, row: int, page: int) -> None:
        """``page`` holds the next tokens of ``row``."""
        pages = self._pages.setdefault(row, [])
        self._changes.append((row, len(pages), page))
        pages.append(page)

    def extend(self, row: int, pages: list[int]) -> None:
        """`append`, of several."""
        held = self._pages.setdefault(row, [])
        self._changes += [(row, index, page) for index, page in enumerate(pages, len(held))]
        held += pages

    def pages(self, row: int) -> list[int]:
        """The pages of ``row``, a copy."""
        return list(self._pages.get(row, ()))

    def clear(self, row: int) -> list[int]:
        """Forget ``row``, and return the pages it had."""
        return self._pages.pop(row, [])

    def drain(self) -> NDArray[np.int32]:
        """[k, 3] (row, index, page) of what has changed since the last call."""
        changes = np.array(self._changes, np.int32).reshape(-1, 3)
        self._changes.clear()
        return changes
