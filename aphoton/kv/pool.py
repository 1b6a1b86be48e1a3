"""`PagePool`: the KV pages, with reference counts and reservations."""

__all__ = ["PagePool"]


class PagePool:
    """Hands out page ids 1..pages-1; page 0 is padding and belongs to nobody.

    A page is taken against a reservation made before, so that a sequence that was admitted can always run to its end.
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
        self._reserved = 0

    @property
    def usable(self) -> int:
        """Pages there are to hand out, in use or not."""
        return self.pages - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds, reserved or not."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.usable - self.free

    @property
    def reserved(self) -> int:
        """Free pages that are promised to somebody."""
        return self._reserved

    def reserve(self, count: int) -> bool:
        """Promise ``count`` pages; False, and nothing changes, when so many are not left."""
        if count > len(self._free) - self._reserved:
            return False
        self._reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Give back a promise that was not used."""
        assert 0 <= count <= self._reserved, (count, self._reserved)
        self._reserved -= count

    def take(self, count: int) -> list[int]:
        """Pages against a reservation, with one reference each."""
        assert self._reserved >= count, "a page is taken against a reservation"
        self._reserved -= count
        if not count:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """One more reference to a page that is held."""
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
