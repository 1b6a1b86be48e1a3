"""`PagePool` against a model of it, over random histories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aphoton.kv import PagePool


class PoolHistory(RuleBasedStateMachine):
    """Take, retain and release in any order that the contract allows."""

    @initialize(pages=st.integers(2, 12))
    def begin(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.refs: dict[int, int] = {}

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.usable - len(self.refs)))
        pages = self.pool.take(count)
        assert len(pages) == len(set(pages)) == count
        for page in pages:
            assert 1 <= page < self.pool.pages, "page 0 is padding"
            assert page not in self.refs, "a page that somebody holds is not handed out"
            self.refs[page] = 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        self.pool.retain(pages)
        for page in pages:
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
        assert all(self.pool.references(page) == count for page, count in self.refs.items())


TestPoolHistory = PoolHistory.TestCase


def test_the_page_given_back_last_is_taken_first() -> None:
    pool = PagePool(10)
    pages = pool.take(3)
    pool.release(pages[1:2])
    assert pool.take(1) == pages[1:2]


@given(st.integers(1, 5))
def test_no_more_pages_than_there_are_and_none_released_twice(count: int) -> None:
    pool = PagePool(count + 1)
    with pytest.raises(AssertionError):
        pool.take(count + 1)
    page, *_ = pool.take(count)
    pool.release([page])
    with pytest.raises(AssertionError):
        pool.release([page])
    with pytest.raises(AssertionError):
        pool.retain([page])


def test_a_pool_has_room_for_a_page_beside_the_padding() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)
