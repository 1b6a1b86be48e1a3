"""`RadixCache` against a model of it: a dictionary from the tokens of a page, and of all before it, to the page."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aphoton.kv import CachedPage, PagePool, RadixCache

SIZE = 2
NAMESPACES = (None, "a", ("b", 1))


def ints(tokens: tuple[int, ...]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(tokens, np.int32)


class Row:
    """Who reads cached pages and computes others, as the scheduler does it."""

    def __init__(self, namespace: object, tokens: tuple[int, ...], path: list[CachedPage], pages: list[int]) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.path = path
        self.pages = pages
        self.growing = True


class RadixHistory(RuleBasedStateMachine):
    """Rows begin, fill pages and end, pages make room, and paths are dropped, in any order."""

    @initialize(pages=st.integers(6, 24))
    def begin(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.cache = RadixCache(self.pool, SIZE)
        self.rows: list[Row] = []
        # What the tree must have: (namespace, tokens of the page and all before it) -> page; last used last.
        self.known: dict[tuple[object, tuple[int, ...]], int] = {}

    def prefixes(self, row: Row, count: int) -> list[tuple[object, tuple[int, ...]]]:
        return [(row.namespace, row.tokens[: (index + 1) * SIZE]) for index in range(count)]

    def used(self) -> set[tuple[object, tuple[int, ...]]]:
        return {
            key
            for row in self.rows
            for key, page in zip(self.prefixes(row, len(row.path)), row.path, strict=True)
            if self.known.get(key) == page.page
        }

    @rule(
        namespace=st.sampled_from(NAMESPACES), tokens=st.lists(st.integers(0, 1), max_size=9).map(tuple), data=st.data()
    )
    def arrive(self, namespace: object, tokens: tuple[int, ...], data: st.DataObject) -> None:
        most = data.draw(st.integers(0, len(tokens) // SIZE))
        path = self.cache.match(namespace, ints(tokens), most)
        row = Row(namespace, tokens, path, [])
        expected = []
        for key in self.prefixes(row, most):
            if key not in self.known:
                break
            expected.append(self.known[key])
        assert [page.page for page in path] == expected, "the longest path, compared by tokens"
        self.cache.use(path)
        new = len(tokens) // SIZE - len(path)
        self.rows.append(row)
        self.room(new)
        if new > self.pool.free:
            self.cache.unuse(path)
            self.rows.remove(row)
            return
        self.pool.retain(expected)
        row.pages = expected + self.pool.take(new)

    def room(self, count: int) -> None:
        lack = max(0, count - self.pool.free)
        idle = [key for key in self.known if key not in self.used()]
        assert len(idle) == self.cache.idle
        free = self.pool.free
        assert self.cache.evict(count - self.pool.free) == min(lack, len(idle))
        assert self.pool.free == free + min(lack, len(idle))
        still = set()
        for key in idle:
            namespace, tokens = key
            if len(self.cache.match(namespace, ints(tokens), len(tokens) // SIZE)) == len(tokens) // SIZE:
                still.add(key)
        for key in idle:
            if key not in still:
                del self.known[key]
        assert len(idle) - len(still) == min(lack, len(idle))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        end = data.draw(st.integers(len(row.path), len(row.pages)))
        if not row.growing or end == len(row.path):
            return
        begin = len(row.path)
        dropped = bool(row.path) and row.path[-1].parent is None
        row.growing = self.cache.grow(
            row.namespace, row.path, ints(row.tokens[begin * SIZE : end * SIZE]), row.pages[begin:end]
        )
        for key, page in list(zip(self.prefixes(row, end), row.pages, strict=False))[begin:]:
            if key in self.known or dropped:
                assert not row.growing, "the tree has another page with these tokens"
                break
            self.known[key] = page
        else:
            assert row.growing and len(row.path) == end

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        row = data.draw(st.sampled_from(self.rows))
        dropped = bool(row.path) and row.path[-1].parent is None
        if keep:
            begin = len(row.path)
            self.cache.keep(
                row.namespace,
                row.path,
                ints(row.tokens[begin * SIZE :])[: (len(row.pages) - begin) * SIZE],
                row.pages[begin:],
            )
            if not dropped:
                for key, page in zip(self.prefixes(row, len(row.pages)), row.pages, strict=True):
                    self.known.setdefault(key, page)
        self.rows.remove(row)
        self.cache.unuse(row.path)
        self.pool.release(row.pages)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        namespace, tokens = data.draw(st.sampled_from(sorted(self.known, key=repr)))
        path = self.cache.match(namespace, ints(tokens), len(tokens) // SIZE)
        self.cache.drop(path[-1])
        for key in list(self.known):
            if key[0] == namespace and key[1][: len(tokens)] == tokens:
                del self.known[key]

    @invariant()
    def agrees(self) -> None:
        users = self.cache.check()
        assert sorted(users) == sorted(self.known.values())
        assert len(self.cache) == len(self.known)
        assert self.cache.idle == len(self.known.keys() - self.used())
        held = {page for row in self.rows for page in row.pages} | set(self.known.values())
        assert self.pool.used == len(held), "nothing leaks"


TestRadixHistory = RadixHistory.TestCase


def filled(cache: RadixCache, tokens: tuple[int, ...], namespace: object = None) -> list[int]:
    """A row that computes ``tokens``, keeps what the cache does not have, and ends; its own pages."""
    path = cache.match(namespace, ints(tokens), len(tokens) // SIZE)
    cache.use(path)
    hits = [page.page for page in path]
    cache.pool.retain(hits)
    pages = hits + cache.pool.take(len(tokens) // SIZE - len(path))
    assert cache.grow(namespace, path, ints(tokens[len(hits) * SIZE :]), pages[len(hits) :])
    cache.unuse(path)
    cache.pool.release(pages)
    return pages


def hits(cache: RadixCache, tokens: tuple[int, ...], namespace: object = None) -> int:
    return len(cache.match(namespace, ints(tokens), len(tokens) // SIZE))


def test_what_was_used_longest_ago_makes_room_first_and_the_end_of_a_path_before_its_beginning() -> None:
    cache = RadixCache(PagePool(10), SIZE)
    filled(cache, (1, 1, 2, 2, 3, 3))
    filled(cache, (1, 1, 4, 4))
    filled(cache, (5, 5))
    filled(cache, (1, 1, 2, 2))  # used again
    left = [(1, 1, 2, 2, 3, 3), (1, 1, 4, 4), (5, 5), (1, 1, 2, 2), (1, 1)]
    while left:
        assert cache.evict(1) == 1
        gone = left.pop(0)
        assert hits(cache, gone) == len(gone) // SIZE - 1
        assert all(hits(cache, tokens) == len(tokens) // SIZE for tokens in left)
    assert cache.evict(1) == 0
    assert cache.pool.free == cache.pool.usable


def test_a_page_in_use_makes_no_room() -> None:
    cache = RadixCache(PagePool(10), SIZE)
    filled(cache, (1, 1, 2, 2, 3, 3))
    path = cache.match(None, ints((1, 1, 2, 2)), 2)
    cache.use(path)
    assert cache.evict(9) == 1, "the third only"
    cache.unuse(path)
    assert cache.evict(9) == 2


def test_a_namespace_ends_with_its_last_member() -> None:
    cache = RadixCache(PagePool(10), SIZE)
    for _ in range(2):
        cache.enter("mine")
    filled(cache, (1, 1, 2, 2), "mine")
    filled(cache, (1, 1))
    assert hits(cache, (1, 1, 2, 2), "mine") == 2 and hits(cache, (1, 1, 2, 2), "yours") == 0
    assert not cache.alone("mine")
    cache.leave("mine")
    assert cache.alone("mine") and hits(cache, (1, 1, 2, 2), "mine") == 2
    cache.leave("mine")
    assert hits(cache, (1, 1, 2, 2), "mine") == 0 and len(cache) == cache.idle == 1
    assert hits(cache, (1, 1)) == 1, "the shared one stays"


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=SIZE, max_size=SIZE).map(tuple), st.integers(0, SIZE - 1))
def test_tokens_are_compared_whole(tokens: tuple[int, ...], where: int) -> None:
    cache = RadixCache(PagePool(4), SIZE)
    filled(cache, tokens)
    other = list(tokens)
    other[where] ^= 1 << 24
    assert hits(cache, tokens) == 1
    assert hits(cache, tuple(other)) == 0
