"""`Logprobs`."""

import numpy as np

from aphoton.scheduler.logprobs import Logprobs


def test_entries_are_made_once() -> None:
    entries = Logprobs()
    for token in range(3):
        tops = np.array([[token, 7, 8]], np.int32), np.array([[-1.0, -2.0, -3.0]], np.float32)
        entries.add([token], [-1.0], *tops)
        read, short = entries.read(), entries.read_short(1)
        assert [one.token_id for one in read] == [one.token_id for one in short] == list(range(token + 1))
        assert [len(one.top) for one in short] == [1] * (token + 1)
        assert read[-1].top == ((token, -1.0), (7, -2.0), (8, -3.0)) and short[-1].top == read[-1].top[:1]
        before = [*read, *short]
        assert all(a is b for a, b in zip([*entries.read(), *entries.read_short(1)], before, strict=True))
