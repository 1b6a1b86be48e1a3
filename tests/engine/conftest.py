"""Engines on the small random model."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from onethread import one_thread as one_thread

from aphoton import Engine
from aphoton.scheduler import Sequence
from aphoton.scheduler.ends import Ends


@pytest.fixture
async def tiny() -> AsyncIterator[Engine]:
    async with Engine("random:tiny", dtype="float32", max_rows=8, kv_pages=200) as engine:
        yield engine


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> dict[Sequence, int]:
    """How often each sequence has ended."""
    counts: dict[Sequence, int] = {}
    finish = Ends.finish

    def counted(self: Ends, sequence: Sequence, *args: Any, **kwargs: Any) -> None:
        counts[sequence] = counts.get(sequence, 0) + 1
        finish(self, sequence, *args, **kwargs)

    monkeypatch.setattr(Ends, "finish", counted)
    return counts
