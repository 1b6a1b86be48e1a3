"""`StopStrings`: ends a text at the first stop string."""

from collections import deque
from collections.abc import Iterable

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the first of some strings in a text that comes in pieces.

    The stop string that ends first wins; of several that end together, the longest. Only text that may still become
    a stop string is held back, so what has been shown never has to be taken back. How the text is cut into pieces
    does not matter. The cost is a few look-ups a character (Aho and Corasick, CACM 18(6), 1975).

    :param include: show the stop string too.
    :ivar hit: the stop string found, or None. Nothing is shown after it.
    """

    __slots__ = ("_depth", "_failure", "_found", "_held", "_include", "_node", "_steps", "hit")

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._include = include
        self.hit: str | None = None
        self._held = ""
        self._node = 0
        # Node 0 is the empty string, any other a prefix of a stop string, `_depth` characters long. `_steps` are the
        # prefixes one character longer, `_failure` the longest other node that is a suffix of this one, `_found` the
        # longest stop string that is a suffix of this one.
        self._steps: list[dict[str, int]] = [{}]
        self._failure = [0]
        self._found: list[str | None] = [None]
        self._depth = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def fresh(self) -> "StopStrings":
        """The same for another text, from its beginning. They share what the strings were made into."""
        other = StopStrings((), self._include)
        other._steps, other._failure, other._found, other._depth = self._steps, self._failure, self._found, self._depth
        return other

    def push(self, text: str, *, ends: bool = True) -> str:
        """What can be shown now, of ``text`` and of what was held back before it.

        :param ends: stop strings that end in ``text`` count; those that begin there and end later do in any case.
        """
        if self.hit is not None:
            return ""
        if not self._steps[0]:
            return text
        steps, failure, found = self._steps, self._failure, self._found
        node = self._node
        for at, char in enumerate(text, 1):
            while (after := steps[node].get(char)) is None and node:
                node = failure[node]
            node = after or 0
            if (stop := found[node]) is not None:
                if not ends:
                    while node and not steps[node]:  # as far as no stop string goes on: it need not be held back
                        node = failure[node]
                    continue
                self.hit = stop
                shown = self._held + text[:at]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(stop)]
        self._node = node
        shown = self._held + text
        keep = len(shown) - self._depth[node]
        self._held = shown[keep:]
        return shown[:keep]

    def finish(self) -> str:
        """The text that was held back: no stop string came of it."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._steps[node]:
                self._steps[node][char] = len(self._steps)
                self._steps.append({})
                self._failure.append(0)
                self._found.append(None)
                self._depth.append(self._depth[node] + 1)
            node = self._steps[node][char]
        if node:
            self._found[node] = stop

    def _link(self) -> None:
        queue = deque(self._steps[0].values())
        while queue:  # breadth first: a node's failure is nearer to the root and so is ready
            node = queue.popleft()
            for char, after in self._steps[node].items():
                fallback = self._failure[node]
                while char not in self._steps[fallback] and fallback:
                    fallback = self._failure[fallback]
                self._failure[after] = self._steps[fallback].get(char, 0)
                self._found[after] = self._found[after] or self._found[self._failure[after]]
                queue.append(after)
