"""Paged attention against the formula, one query at a time in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aphoton.attention import KVCache, TorchAttention
from aphoton.attention import torch as attention_torch

LAYERS = 2


class Rows:
    """Rows that are fed step by step, with random queries, keys and values, on shuffled pages.

    Pages start full of NaN, page 0 stays so, and pages that are given back are filled with it again.
    """

    def __init__(self, *, heads, kv_heads, head_dim, page_size, pages=64, dtype=torch.float32, seed=0):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.cache = KVCache(
            layers=LAYERS, pages=pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
        )
        self.cache.data.fill_(torch.nan)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = (np.random.default_rng(seed).permutation(pages - 1) + 1).tolist()
        self.tables = {}
        self.past = {}  # row: keys and values of each layer, [length, 2, LAYERS, kv_heads, head_dim]

    def feed(self, lengths, window=None):
        """One step of ``{row: new tokens}``: what came out, and what should have."""
        starts = {row: len(self.past.get(row, ())) for row in lengths}
        for row, length in lengths.items():
            table = self.tables.setdefault(row, [])
            while len(table) * self.cache.page_size < starts[row] + length:
                table.append(self.free.pop())
        width = max(len(self.tables[row]) for row in lengths) + 1
        tables = [self.tables[row] + [0] * (width - len(self.tables[row])) for row in lengths]
        attention = TorchAttention(self.cache)
        plan = attention.plan(
            np.array(list(starts.values()), np.int32),
            np.array(list(lengths.values()), np.int32),
            torch.tensor(tables, dtype=torch.int32),
        )
        total = sum(lengths.values())
        q = self.draw(total, LAYERS, self.heads)
        kv = self.draw(total, 2, LAYERS, self.kv_heads)
        got = [
            attention.attend(layer, q[:, layer], kv[:, 0, layer], kv[:, 1, layer], plan, window)
            for layer in range(LAYERS)
        ]
        first = 0
        wanted = []
        for row, length in lengths.items():
            empty = kv[:0]
            self.past[row] = torch.cat((self.past.get(row, empty), kv[first : first + length]))
            for position in range(starts[row], starts[row] + length):
                wanted.append(self.formula(q[first], self.past[row][: position + 1], window))
                first += 1
        assert plan.positions.tolist() == [
            starts[row] + index for row, length in lengths.items() for index in range(length)
        ]
        assert plan.last.tolist() == (np.cumsum(list(lengths.values())) - 1).tolist()
        return torch.stack(got, dim=1), torch.stack(wanted)

    def drop(self, row):
        """Ends a row and gives its pages back."""
        pages = self.tables.pop(row)
        self.cache.data[:, :, pages] = torch.nan
        self.free[:0] = pages
        del self.past[row]

    def draw(self, *shape):
        return torch.randn(*shape, self.head_dim, generator=self.generator).to(self.cache.data.dtype)

    def formula(self, q, past, window):
        """[LAYERS, heads * head_dim] of one query [LAYERS, heads, head_dim]."""
        past = past[0 if window is None else max(len(past) - window, 0) :]
        keys, values = past.double().repeat_interleave(self.heads // self.kv_heads, dim=3).unbind(1)
        weights = (torch.einsum("lhd,clhd->lhc", q.double(), keys) * self.head_dim**-0.5).softmax(-1)
        return torch.einsum("lhc,clhd->lhd", weights, values).flatten(1).to(q.dtype)


def check(rows, lengths, window=None):
    got, wanted = rows.feed(lengths, window)
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_and_mixed(page_size, heads, kv_heads, window, dtype):
    rows = Rows(heads=heads, kv_heads=kv_heads, head_dim=8, page_size=page_size, dtype=dtype, pages=128)
    check(rows, {"a": 7, "b": 1, "c": 20}, window)
    check(rows, {"c": 1, "a": 1}, window)
    check(rows, {"a": 1, "d": 5, "b": 1, "c": 9}, window)
    check(rows, {"a": 1, "b": 1, "c": 1, "d": 1}, window)
    rows.drop("c")
    check(rows, {"e": 33, "b": 4}, window)
    check(rows, {"e": 1}, window)
    check(rows, {"e": 2}, window)


@settings(deadline=None)
@given(
    steps=st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 9), min_size=1), min_size=1, max_size=8),
    page_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 20),
    ends=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 3))),
)
def test_any_schedule(steps, page_size, window, ends):
    rows = Rows(heads=2, kv_heads=1, head_dim=4, page_size=page_size, pages=300)
    for index, lengths in enumerate(steps):
        check(rows, lengths, window)
        for row in [row for row in rows.tables if (index, row) in ends]:
            rows.drop(row)


@pytest.mark.parametrize("window", [None, 3, 100, 600])
def test_long_prompts_are_attended_in_blocks(window, monkeypatch):
    """Beyond one block of queries, alone and behind a prefix, windows shorter and longer than a block."""
    monkeypatch.setattr(attention_torch, "QUERY_BLOCK", 32)
    rows = Rows(heads=2, kv_heads=1, head_dim=4, page_size=16, pages=64)
    check(rows, {"a": 150}, window)
    check(rows, {"b": 20, "a": 70}, window)
    check(rows, {"a": 33, "b": 200}, window)
    check(rows, {"a": 1, "b": 1}, window)


def test_layers_may_have_windows_of_their_own():
    """Of one plan: what is seen through each window is worked out when it is first asked for."""
    rows = Rows(heads=2, kv_heads=2, head_dim=4, page_size=4)
    rows.feed({"a": 10, "b": 3})
    attention = TorchAttention(rows.cache)
    tables = torch.tensor([[*rows.tables["a"], rows.free[-1]], [*rows.tables["b"], 0, 0, 0]], dtype=torch.int32)
    plan = attention.plan(np.array([10, 3], np.int32), np.array([1, 1], np.int32), tables)
    q, k, v = rows.draw(2, 2), rows.draw(2, 2), rows.draw(2, 2)
    for window in (None, 2, 1, None):
        got = attention.attend(0, q, k, v, plan, window)
        for index, row in enumerate("ab"):
            new = torch.stack((k[index], v[index]))[None, :, None].expand(1, 2, LAYERS, 2, 4)
            past = torch.cat((rows.past[row], new))
            wanted = rows.formula(q[index].expand(LAYERS, 2, 4), past, window)[0]
            torch.testing.assert_close(got[index], wanted, rtol=1e-5, atol=1e-5)


def test_keys_and_values_go_where_the_table_says():
    rows = Rows(heads=1, kv_heads=1, head_dim=2, page_size=4)
    rows.feed({"a": 6})
    first, second = rows.tables["a"]
    keys, values = rows.cache.data[1, :, [first, second]].flatten(1, 2).squeeze(2)
    assert torch.equal(keys[:6], rows.past["a"][:, 0, 1, 0])
    assert torch.equal(values[:6], rows.past["a"][:, 1, 1, 0])
    assert (keys[6:] == 0).all()
    others = [page for page in range(64) if page not in (first, second)]
    assert rows.cache.data[:, :, others].isnan().all()


def test_a_page_in_use_is_never_cleaned():
    """Only a page that a row begins is zeroed; one that it goes on in keeps what is there."""
    rows = Rows(heads=1, kv_heads=1, head_dim=2, page_size=4)
    rows.feed({"a": 2})
    before = rows.cache.data[:, :, rows.tables["a"][0], :2].clone()
    rows.feed({"a": 1})
    assert torch.equal(rows.cache.data[:, :, rows.tables["a"][0], :2], before)
