"""`fill_all`: the masks of many sequences at once."""

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

__all__ = ["fill_all", "loop_share"]

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))

QUICK = 0.3e-3
"""Seconds that a mask may take on the loop."""

TURN = 1e-3
"""Seconds that the masks of a step may take on the loop together."""

WAKING = 0.5e-3
"""Seconds that threads may take to wake. Less work for each is not worth it, and how long it took would say nothing."""


@cache
def _executor() -> LLExecutor:
    return LLExecutor(THREADS)


def loop_share(costs: Sequence[float]) -> int:
    """How many masks may be made on the loop: the first ones. Either all, or as many as can be of rising ``costs``.

    Threads would not make that more: sequences of one grammar take turns, for they share a lexer.
    """
    total = 0.0
    for count, cost in enumerate(costs):
        total += cost
        if cost > QUICK or total > TURN:
            return count
    return len(costs)


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
    if THREADS > 1 and len(together) > 1 and work > THREADS * WAKING:
        _fill_in_parallel(together, masks)
    else:
        _fill_in_turn(together, masks)
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


def _fill_in_parallel(grammars: dict[int, GrammarMasker], masks: NDArray[np.uint32]) -> None:
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


def _fill_in_turn(grammars: dict[int, GrammarMasker], masks: NDArray[np.uint32]) -> None:
    # Each takes some microseconds, so this does not go through `GrammarMasker.fill`, nor ask the clock of the thread's
    # own time, a system call, more than twice: it only says what none can have taken more than.
    address, size, times = masks.ctypes.data, masks.shape[1] * masks.itemsize, []
    began, last = clock(), perf_counter()
    for i, grammar in grammars.items():
        grammar.matcher.unsafe_compute_mask_ptr(address + i * size, size)
        now = perf_counter()
        times.append(now - last)
        last = now
    all_of_them = clock() - began
    for grammar, took in zip(grammars.values(), times, strict=True):
        grammar.learn(min(took, all_of_them))


def _grammar(masker: Masker) -> GrammarMasker | None:
    """The part of a masker that takes time."""
    if isinstance(masker, Rules):
        masker = masker.first
    return masker if isinstance(masker, GrammarMasker) else None
