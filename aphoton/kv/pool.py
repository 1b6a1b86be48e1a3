"""`PagePool`: the KV pages, with reference counts."""

__all__ = ["PagePool"]


class PagePool:
    """Hands out page ids 1..pages-1; page 0 is padding and belongs to nobody.

    A page goes back when its last reference does. The page given back last is taken first: what is in use stays
    small and warm.
    """

    def __init__(self, pages: int) -> None:
        """:param pages: all pages, the padding page included: at least 2."""
        if pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, not {pages}")
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))
        self._refs = [0] * pages  # not an array: they are few at a time

    @property
    def usable(self) -> int:
        """Pages there are to hand out, in use or not."""
        return self.pages - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.usable - self.free

    def take(self, count: int) -> list[int]:
        """So many free pages, with one reference each."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        if not count:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: list[int]) -> None:
        """One more reference to each of pages that are held."""
        for page in pages:
            assert self._refs[page] > 0, page
            self._refs[page] += 1

    def release(self, pages: list[int]) -> None:
        """One reference less of each; at none a page is free."""
        refs, free = self._refs, self._free
        for page in pages:
            refs[page] -= 1
            if not refs[page]:
                free.append(page)
            assert refs[page] >= 0, page

    def references(self, page: int) -> int:
        return self._refs[page]
