"""`PageTable`: what rows have, and what a device that applies the changes would have."""

from hypothesis import given
from hypothesis import strategies as st

from aphoton.kv import PageTable


@given(st.lists(st.tuples(st.sampled_from(["append", "clear", "drain"]), st.integers(1, 4), st.integers(1, 99))))
def test_the_device_has_what_the_host_has(history: list[tuple[str, int, int]]) -> None:
    table = PageTable()
    host: dict[int, list[int]] = {}
    device: dict[tuple[int, int], int] = {}
    for action, row, page in [*history, ("drain", 1, 1)]:
        if action == "append":
            table.append(row, page)
            host.setdefault(row, []).append(page)
        elif action == "clear":
            assert table.clear(row) == host.pop(row, [])
        else:
            changes = table.drain()
            assert changes.shape[1] == 3
            device.update({(r, index): p for r, index, p in changes.tolist()})
            assert not len(table.drain()), "a change is sent once"
            for r, pages in host.items():
                assert [device[r, index] for index in range(len(pages))] == pages
    for row in range(1, 5):
        assert table.pages(row) == host.get(row, [])
