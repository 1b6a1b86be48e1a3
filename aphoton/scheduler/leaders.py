"""`Leaders`: whose prompts compute the pages that others begin with, so that those wait and share them."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aphoton.kv import CachedPage
from aphoton.scheduler.holdings import Holdings
from aphoton.scheduler.rows import Rows
from aphoton.scheduler.sequence import Sequence

__all__ = ["SCORED_CHUNK", "Heads", "Leaders"]

SCORED_CHUNK = 512
"""Tokens that a row feeds at once when they are scored: each has logits of its own then."""

Heads = dict[tuple[CachedPage, bytes], Sequence]
"""Who computes a page next, by the page before it and the bytes of its tokens."""


class Leaders:
    """For whom those wait who begin with pages that another is computing.

    A follower keeps its claim to a row and to pages, so whoever goes first meanwhile takes nothing from it.
    """

    def __init__(self, rows: Rows, holdings: Holdings, *, max_step_tokens: int) -> None:
        self._rows = rows
        self._holdings = holdings
        self._max_step_tokens = max_step_tokens
        # By follower: its leader, the pages that it waits for, and how many it will need beside them.
        self._leaders: dict[Sequence, tuple[Sequence, int, int]] = {}

    # Who leads

    def heads(self, sequences: Iterable[Sequence]) -> Heads:
        """The pages that ``sequences``, which have rows, compute next."""
        heads: Heads = {}
        for sequence in sequences:
            self.put_head(heads, sequence)
        return heads

    def put_head(self, heads: Heads, sequence: Sequence) -> None:
        """Note the page that ``sequence`` computes next, if others can have it then, and none who goes before does."""
        row, size = sequence.row, self._holdings.page_size
        path, known = self._rows.paths[row], self._rows.known[row]
        begin = len(path) * size
        if not self._rows.growing[row] or begin + size > len(known):
            return
        if sequence.unscored and min(len(known) - begin, self._max_step_tokens) > SCORED_CHUNK:
            return  # it is slower than others are alone
        page = path[-1] if path else self._holdings.root(sequence)
        key = known[begin : begin + size].tobytes()
        other = heads.get((page, key))
        if other is None or sequence.order < other.order:
            heads[page, key] = sequence

    # Who follows

    def follow(self, sequence: Sequence, known: NDArray[np.int32], path: list[CachedPage], heads: Heads) -> int:
        """Let it wait for whoever computes its next page, if that one goes before it.

        :param path: the pages at its beginning that are cached.
        :returns: pages that it claims; 0 when it waits for nobody.
        """
        size, most = self._holdings.page_size, self._holdings.most(sequence, known)
        begin = len(path) * size
        if len(path) >= most or not heads:
            return 0
        key = known[begin : begin + size].tobytes()
        leader = heads.get((path[-1] if path else self._holdings.root(sequence), key))
        if leader is None or leader.order > sequence.order:
            return 0
        its = self._rows.known[leader.row]
        alike = known[: most * size][: len(its)] == its[: most * size]
        count = len(alike) if alike.all() else int(alike.argmin())
        shared = count // size
        claim = self._holdings.pages_for(len(known), 1) - shared + 1
        self._leaders[sequence] = (leader, shared, claim)
        return claim

    def claim(self, sequence: Sequence) -> int:
        """Pages that it claims while it waits for some that are still to come; 0 when it waits for none."""
        if sequence not in self._leaders:
            return 0
        leader, count, claim = self._leaders[sequence]
        rows, row = self._rows, leader.row
        return claim if leader in rows.prefilling and rows.growing[row] and len(rows.paths[row]) < count else 0

    def take(self, sequence: Sequence) -> list[CachedPage]:
        """What it has waited for, as far as that is there. It waits no more."""
        if sequence not in self._leaders:
            return []
        leader, count, _ = self._leaders.pop(sequence)
        path = self._rows.paths[leader.row][:count] if leader.row else []
        return [] if path and path[-1].parent is None else path

    def leave(self, sequence: Sequence) -> None:
        """It has ended, whether it waited for anybody or not."""
        self._leaders.pop(sequence, None)

    # Invariants

    def check(self, waiting: set[Sequence]) -> None:
        """Assert what must hold between any two calls."""
        assert self._leaders.keys() <= waiting

    def check_idle(self) -> None:
        """Assert that nothing is held when nobody is there."""
        assert not self._leaders
