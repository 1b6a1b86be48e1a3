"""`fill_quick` and `fill_all`: the masks of many sequences at once."""

import os
from collections.abc import Sequence
from functools import cache
from time import perf_counter

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from aphoton.sampling.grammarmasker import GrammarMasker, clock
from aphoton.sampling.masker import Masker
from aphoton.sampling.rules import Rules

__all__ = ["QUICK", "fill_all", "fill_quick"]

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))

QUICK = 0.3e-3
"""Seconds that a mask may take on the loop."""

TURN = 1e-3
"""Seconds after which no further mask of a step is begun on the loop."""

WAKING = 0.5e-3
"""Seconds that threads may take to wake. Less work for each is not worth it, and how long it took would say nothing."""


@cache
def _executor() -> LLExecutor:
    return LLExecutor(THREADS)


def fill_quick(maskers: Sequence[Masker], masks: NDArray[np.uint32]) -> tuple[int, dict[int, Exception]]:
    """`Masker.fill` for the first ones, as far as the loop may do it itself: up to one whose mask takes long, and until
    they have taken `TURN` together.

    A thread would have to wake and take the interpreter's lock in turn with the loop, which takes longer than the masks
    of many; and sequences of one grammar take turns in any case, for they share a lexer.

    :param maskers: m of them.
    :param masks: [m, mask_words], contiguous.
    :returns: how many are done, and what was raised, by index; the masks of these mean nothing.
    """
    return _fill_in_turn(maskers, masks, quick=QUICK, turn=TURN)


def fill_all(maskers: Sequence[Masker], masks: NDArray[np.uint32]) -> dict[int, Exception]:
    """`Masker.fill` for several sequences: grammars that take long are computed in parallel, on threads that llguidance
    keeps.

    :param maskers: m of them, of which none is used by another thread meanwhile.
    :param masks: [m, mask_words], contiguous.
    :returns: what was raised, by index; the masks of these mean nothing.
    """
    together = {
        i: grammar
        for i, masker in enumerate(maskers)
        if (grammar := _grammar(masker)) is not None and not grammar.matcher.is_error()
    }
    work = sum(grammar.cost for grammar in together.values())
    if THREADS == 1 or len(together) < 2 or work <= THREADS * WAKING:
        return _fill_in_turn(maskers, masks)[1]
    _compute_in_parallel(together, masks)
    _clear(maskers, masks)
    errors: dict[int, Exception] = {}
    for i, masker in enumerate(maskers):
        try:
            computed = together.get(i)
            if computed is None:
                masker.fill(masks[i])
                continue
            computed.finish(masks[i])
            if isinstance(masker, Rules):
                masker.narrow(masks[i])
        except Exception as error:
            errors[i] = error
    return errors


def _fill_in_turn(
    maskers: Sequence[Masker],
    masks: NDArray[np.uint32],
    *,
    quick: float = float("inf"),
    turn: float = float("inf"),
) -> tuple[int, dict[int, Exception]]:
    # A grammar's mask takes some microseconds, and nobody gets a token before the last one is made. So these do not go
    # through `GrammarMasker.fill`, which asks the clock of the thread's own time, a system call, twice for each. Here
    # it is asked twice for all of them, which bounds the time of each.
    address, size = masks.ctypes.data, masks.shape[1] * masks.itemsize
    times: list[float] = []
    errors: dict[int, Exception] = {}
    began, last = clock(), perf_counter()
    until = last + turn
    for i, masker in enumerate(maskers):
        if masker.cost > quick or last >= until:
            break
        try:
            if isinstance(masker, GrammarMasker):
                masker.matcher.unsafe_compute_mask_ptr(address + i * size, size)
            else:
                masker.fill(masks[i])
        except Exception as error:
            errors[i] = error
        now = perf_counter()
        times.append(now - last)
        last = now
    most = clock() - began
    _clear(maskers, masks[: len(times)])
    for i, took in enumerate(times):
        masker = maskers[i]
        if isinstance(masker, GrammarMasker) and i not in errors:
            masker.learn(min(took, most))
            try:
                masker.finish(masks[i])
            except Exception as error:
                errors[i] = error
    return len(times), errors


def _compute_in_parallel(grammars: dict[int, GrammarMasker], masks: NDArray[np.uint32]) -> None:
    began = perf_counter()
    _executor().unsafe_compute_mask_ptr(
        [(grammar.matcher, i) for i, grammar in grammars.items()],
        masks.ctypes.data,
        masks.shape[1] * masks.itemsize,
        len(masks),
    )
    # Nobody knows which of them took how long, and the threads had to wake: so this makes none look slower than it was
    # known to be, unless it took long. A busy machine must not make all of them slow now and then.
    mean = (perf_counter() - began) * min(THREADS, len(grammars)) / len(grammars)
    for grammar in grammars.values():
        grammar.learn(mean if mean > 2 * QUICK else min(mean, grammar.cost))


def _clear(maskers: Sequence[Masker], masks: NDArray[np.uint32]) -> None:
    """Leave none but the model's bits: all maskers are of one vocabulary."""
    grammar = next((grammar for masker in maskers if (grammar := _grammar(masker)) is not None), None)
    if grammar is not None:
        masks[:, -1] &= grammar.inside


def _grammar(masker: Masker) -> GrammarMasker | None:
    """The part of a masker that takes time."""
    if isinstance(masker, Rules):
        masker = masker.first
    return masker if isinstance(masker, GrammarMasker) else None
