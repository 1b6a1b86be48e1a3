"""`Affinity`: which replica holds the beginning of which prompt."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

from aphoton_serve.backend import Job

__all__ = ["Affinity", "beginnings"]

R = TypeVar("R", bound=Hashable)

BLOCK = 512
"""Characters of a text, or of a message as JSON, or tokens of a prompt, between two beginnings."""
HOLDERS = 4
"""Replicas that are remembered of one beginning: those that were given it last."""


def beginnings(job: Job) -> list[int]:
    """Ever longer beginnings of a job's prompt, as hashes of this process.

    The first is the adapter's name, when there is one: pages made with another adapter are of no use, and the replica
    that has had it last has it still. A conversation has one after each message, so that its next turn knows them all
    but the newest.
    """
    chain: list[int] = []
    if job.adapter:
        chain.append(hash(("adapter", job.adapter)))
    if job.messages is not None:
        if job.tools:
            _extend(chain, msgspec.json.encode(job.tools), rest=True)
        for message in job.messages:
            _extend(chain, msgspec.json.encode(message), rest=True)
    elif isinstance(job.prompt, str):
        _extend(chain, job.prompt, rest=False)
    elif job.prompt is not None:
        _extend(chain, tuple(job.prompt), rest=False)
    return chain


def _extend(chain: list[int], text: str | bytes | tuple[int, ...], *, rest: bool) -> None:
    """By one beginning for each whole block, and by one for the ``rest``, when no more can follow in the same place."""
    whole = len(text) if rest else len(text) - len(text) % BLOCK
    for start in range(0, whole, BLOCK):
        chain.append(hash((chain[-1] if chain else 0, text[start : start + BLOCK])))


class Affinity(Generic[R]):
    """Remembers which replicas were given which beginnings, the newest of them."""

    def __init__(self, capacity: int = 100_000) -> None:
        """:param capacity: beginnings."""
        self._capacity = capacity
        self._holders: OrderedDict[int, tuple[R, ...]] = OrderedDict()

    def note(self, chain: Sequence[int], replica: R) -> None:
        """It was given a prompt that begins so."""
        for link in chain:
            others = [other for other in self._holders.get(link, ()) if other != replica]
            self._holders[link] = (replica, *others[: HOLDERS - 1])
            self._holders.move_to_end(link)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def holders(self, chain: Sequence[int], among: set[R]) -> list[R]:
        """Those ``among`` the replicas that were given the longest beginning, newest first."""
        for link in reversed(chain):
            found = [one for one in self._holders.get(link, ()) if one in among]
            if found:
                return found
        return []
