"""Launches made by hand."""

from collections.abc import Iterable

import numpy as np

from aphoton.device.base import Batch, Scored
from aphoton.sampling import RowSampling

PAGE = 4
"""Tokens in a page."""


def batch(
    *rows: tuple[int, int, list[int]],
    pages: Iterable[tuple[int, int, int]] = (),
    admitted: Iterable[RowSampling] = (),
    counts: Iterable[int] | None = None,
    partial: Iterable[int] = (),
    late: Iterable[int] = (),
    scored: Iterable[Scored] = (),
) -> Batch:
    """:param rows: (row, start, tokens) each.
    :param pages: (row, index, page) that are new.
    :param admitted: rows that run for the first time.
    :param counts: tokens sampled before; 0 for those admitted, else 1.
    :param partial, late: rows that are.
    """
    admitted = list(admitted)
    new = [sampling.row for sampling in admitted]

    def ints(values: Iterable[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        return np.array(list(values), np.int32)

    return Batch(
        rows=ints(row for row, _, _ in rows),
        starts=ints(start for _, start, _ in rows),
        lengths=ints(len(tokens) for _, _, tokens in rows),
        counts=ints((0 if row in new else 1 for row, _, _ in rows) if counts is None else counts),
        tokens=ints(token for _, _, tokens in rows for token in tokens),
        new_pages=np.array(list(pages), np.int32).reshape(-1, 3),
        partial=np.isin([row for row, _, _ in rows], list(partial)),
        late=np.isin([row for row, _, _ in rows], list(late)),
        admitted=list(admitted),
        scored=list(scored),
    )


def row(number: int, *, seed: int = 0, temperature: float = 0.0, logprobs: int | None = None) -> RowSampling:
    return RowSampling(seed=seed, row=number, temperature=temperature, logprobs=logprobs)
