"""`PagePool` against a model of it, over random histories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aphoton.kv import PagePool


class PoolHistory(RuleBasedStateMachine):
    """Reserve, take, retain and release in any order that the contract allows."""

    @initialize(pages=st.integers(2, 12))
    def begin(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.refs: dict[int, int] = {}
        self.reserved = 0

    @rule(count=st.integers(0, 6))
    def reserve(self, count: int) -> None:
        room = self.pool.usable - len(self.refs) - self.reserved
        assert self.pool.reserve(count) == (count <= room)
        if count <= room:
            self.reserved += count

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.reserved))
        self.pool.unreserve(count)
        self.reserved -= count

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.reserved))
        pages = self.pool.take(count)
        assert len(pages) == len(set(pages)) == count
        for page in pages:
            assert 1 <= page < self.pool.pages, "page 0 is padding"
            assert page not in self.refs, "a page that somebody holds is not handed out"
            self.refs[page] = 1
        self.reserved -= count

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.retain(page)
        self.refs[page] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        self.pool.release(pages)
        for page in pages:
            self.refs[page] -= 1
            if not self.refs[page]:
                del self.refs[page]

    @invariant()
    def agrees(self) -> None:
        assert self.pool.used == len(self.refs)
        assert self.pool.free == self.pool.usable - len(self.refs)
        assert self.pool.reserved == self.reserved <= self.pool.free
        assert all(self.pool.references(page) == count for page, count in self.refs.items())


TestPoolHistory = PoolHistory.TestCase


def test_the_page_given_back_last_is_taken_first() -> None:
    pool = PagePool(10)
    assert pool.reserve(4)
    pages = pool.take(3)
    pool.release(pages[1:2])
    assert pool.take(1) == pages[1:2]


@given(st.integers(1, 5))
def test_a_page_cannot_be_taken_without_a_promise_nor_released_twice(count: int) -> None:
    pool = PagePool(count + 1)
    with pytest.raises(AssertionError):
        pool.take(1)
    assert pool.reserve(1)
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(AssertionError):
        pool.release([page])
    with pytest.raises(AssertionError):
        pool.retain(page)


def test_a_pool_has_room_for_a_page_beside_the_padding() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)
