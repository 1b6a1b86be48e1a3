"""`Holdings`: the KV pages that rows hold, and those that the prefix cache keeps behind them."""

import numpy as np
from numpy.typing import NDArray

from aphoton.kv import CachedPage, PagePool, PageTable, RadixCache
from aphoton.scheduler.rows import Rows
from aphoton.scheduler.sequence import Sequence

__all__ = ["Holdings"]

Ints = NDArray[np.int32]


class Holdings:
    """What rows have of the KV cache, from the moment they are seated until no step in flight computes them.

    A row shares full pages at its beginning, and writes only pages of its own. What it fills goes to the prefix cache
    once the launch that fills it has been made: steps run in the order of their launches, so a later one may read it.
    """

    def __init__(self, rows: Rows, pages: int, *, page_size: int) -> None:
        self.rows = rows
        self.page_size = page_size
        self.pool = PagePool(pages)
        self.tables = PageTable()
        self.cache = RadixCache(self.pool, page_size)

    @property
    def room(self) -> int:
        """Pages that are free, or are as soon as they are wanted."""
        return self.pool.free + self.cache.idle

    def pages_for(self, prompt: int, limit: int) -> int:
        """Pages that a sequence needs to run to its end. Its last token is never fed, so it needs no place."""
        return -(-(prompt + max(limit, 1) - 1) // self.page_size)

    # Beginnings

    def most(self, sequence: Sequence, known: Ints) -> int:
        """Full pages that it may take from the cache: its last token must be computed, and what is to be scored."""
        if not sequence.cacheable:
            return 0
        most = len(known) - 1
        return (min(most, len(sequence.prompt_scores)) if sequence.unscored else most) // self.page_size

    def match(self, sequence: Sequence, known: Ints, path: list[CachedPage]) -> list[CachedPage]:
        """The pages at its beginning that are cached, of which those in ``path`` are known."""
        return self.cache.match(sequence.namespace, known, self.most(sequence, known), path)

    def needed(self, sequence: Sequence, known: Ints, path: list[CachedPage]) -> int:
        """Of `room`, what seating it takes with the hits in ``path``, and a page to go on with."""
        pages = -(-len(known) // self.page_size)
        return pages - len(path) + self.wants(sequence, known) + self.cache.new_uses(path)

    def wants(self, sequence: Sequence, known: Ints) -> bool:
        """Whether it needs more pages than those of what it begins with."""
        return -(-len(known) // self.page_size) < self.pages_for(len(sequence.prompt), sequence.limit)

    def seat(self, sequence: Sequence, path: list[CachedPage]) -> None:
        """Give its row the pages in ``path``, and new ones for the rest of what it begins with."""
        row = sequence.row
        self.cache.use(path)
        hits = [page.page for page in path]
        self.pool.retain(hits)
        new = -(-len(self.rows.known[row]) // self.page_size) - len(hits)
        self.cache.evict(new - self.pool.free)
        self.tables.extend(row, hits + self.pool.take(new))
        self.rows.paths[row] = path
        self.rows.growing[row] = sequence.cacheable
        self.rows.context[row] = len(hits) * self.page_size

    def root(self, sequence: Sequence) -> CachedPage:
        """Where paths of its namespace begin."""
        return self.cache.root(sequence.namespace)

    def filled(self, sequence: Sequence) -> None:
        """What its row knew is computed up to its ``context`` by launches made: others may read the full pages."""
        row, size = sequence.row, self.page_size
        path = self.rows.paths[row]
        begin, end = len(path), int(self.rows.context[row]) // size
        if self.rows.growing[row] and begin < end:
            tokens = self.rows.known[row][begin * size : end * size]
            self.rows.growing[row] = self.cache.grow(
                sequence.namespace, path, tokens, self.tables.pages(row)[begin:end]
            )

    # Going on

    def extend(self, rows: Ints) -> None:
        """The next page of each row: so many are free."""
        for row, page in zip(rows.tolist(), self.pool.take(len(rows)), strict=True):
            self.tables.append(row, page)

    def coming(self, leaving: list[int], staying: list[int]) -> int:
        """Pages for others to have when the rows in ``leaving`` are released. Slow."""
        if not leaving:
            return 0
        pages = {page for row in leaving for page in self.tables.pages(row)}
        return len(pages.difference(*(self.tables.pages(row) for row in staying)))

    # Ends

    def release(self, sequence: Sequence, *, keep: bool, sound: bool) -> None:
        """Take back what its row has.

        :param keep: leave its full pages to the cache.
        :param sound: false when its KV may not be what it should: what it shares is kept for nobody then.
        """
        row, size = sequence.row, self.page_size
        path, pages = self.rows.paths[row], self.tables.clear(row)
        if not sound:
            for page in path[:1]:
                self.cache.drop(page)
        elif keep:
            # A step in flight may have fed the last token: it stands in a page that the others do not fill.
            whole = min(int(self.rows.context[row]), len(sequence.prompt) + max(len(sequence.output) - 1, 0)) // size
            begin = len(path)
            if begin < whole:
                tokens = sequence.known[begin * size : whole * size]
                self.cache.keep(sequence.namespace, path, tokens, pages[begin:whole])
        self.cache.unuse(path)
        self.pool.release(pages)
        self.rows.paths[row] = []

    # Invariants

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        users = self.cache.check()
        holders: dict[int, int] = {}
        for row, sequence in enumerate(self.rows.sequences):
            pages, path = self.tables.pages(row), self.rows.paths[row]
            assert (sequence is None) == (not pages), row
            assert pages[: len(path)] == [page.page for page in path], "a row reads the pages on its path"
            context = int(self.rows.context[row])
            for index, page in enumerate(pages):
                holders[page] = holders.get(page, 0) + 1
                if index >= context // self.page_size:
                    assert self.pool.references(page) == 1, "a page that is still written is nobody else's"
            if sequence is not None:
                assert len(pages) * self.page_size >= context
                for cached in path:
                    if cached.parent is None:  # dropped: the cache's reference goes with the last user
                        users[cached.page] = cached.users
        for page in holders.keys() | users.keys():
            assert self.pool.references(page) == holders.get(page, 0) + (page in users), page
            assert holders.get(page, 0) >= users.get(page, 0), page
        assert self.pool.used == len(holders.keys() | users.keys()), "nobody else holds one"

    def check_idle(self) -> None:
        """Assert that nothing is held when nobody is there."""
        assert self.pool.free + self.cache.idle == self.pool.usable, "all pages are back"
        assert len(self.cache) == self.cache.idle
        assert not any(self.rows.paths)
