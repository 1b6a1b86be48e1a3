"""Work that is done ahead in threads."""

import threading

import pytest

from aphoton.models.ahead import ahead


def test_results_are_in_order():
    assert list(ahead(lambda x: x * x, range(50))) == [x * x for x in range(50)]
    assert list(ahead(lambda x: x, [])) == []


def test_it_goes_ahead_and_no_further_than_there_are_processors(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    asked = []

    def items():
        for item in range(20):
            asked.append(item)
            yield item

    results = ahead(lambda x: x, items())
    assert asked == []
    for result in results:
        assert len(asked) <= result + 4
        assert len(asked) >= min(result + 3, 20)


def test_items_are_worked_on_at_the_same_time(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=30)
    assert len(list(ahead(lambda _: both.wait(), range(2)))) == 2


def test_a_failure_is_raised_where_its_result_was_due():
    results = ahead(lambda x: 1 // (3 - x), range(10))
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_leaving_early_ends_the_threads(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    results = ahead(lambda x: x, range(1000))
    next(results)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("aphoton-load")]
    assert workers
    results.close()
    assert not any(thread.is_alive() for thread in workers)
