"""`RadixCache`: pages that are kept for what stands in them."""

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from aphoton.kv.pool import PagePool

__all__ = ["CachedPage", "RadixCache"]

Ints = NDArray[np.int32]


class CachedPage:
    """A full page in the tree: its KV is that of the tokens on the way from the root to it.

    :ivar parent: the page before it; a root, which has no page, before the first. None once it is out of the tree.
    :ivar key: its tokens, as the bytes of their int32s. Dictionaries compare them whole, whatever their hashes are.
    :ivar children: the pages that follow it, by their keys.
    :ivar users: rows that have it on their path.
    """

    __slots__ = ("children", "key", "page", "parent", "users")

    def __init__(self, parent: "CachedPage | None", key: bytes, page: int, users: int = 0) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[bytes, CachedPage] = {}
        self.users = users


class RadixCache:
    """A tree of full pages under a root for each namespace, which names whatever else than tokens decides the KV.

    The cache holds one reference of the pool to each of its pages. Who reads pages (a row) holds references of its own,
    and is a user of its path: the cached pages that its sequence begins with, each the parent of the next. Since a user
    of a page uses all before it, a page without users has none behind it either. Those are idle, in the order in which
    they were last used, a page always before its parent; the first of them is a leaf, and makes room first.

    A path ends where the tree has somebody else's page with the row's tokens: a row that has filled a page of its own
    keeps it, and holds no second one for nothing.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self._roots: dict[Hashable, CachedPage] = {}
        self._members: dict[Hashable, int] = {}
        self._idle: OrderedDict[CachedPage, None] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return self._size

    @property
    def idle(self) -> int:
        """Pages that only the cache holds: `evict` can free all of them."""
        return len(self._idle)

    def root(self, namespace: Hashable) -> CachedPage:
        """Where the paths of ``namespace`` begin."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = CachedPage(None, b"", 0)
        return root

    # Namespaces that end

    def enter(self, namespace: Hashable) -> None:
        """One more member of a namespace that ends with its members."""
        self._members[namespace] = self._members.get(namespace, 0) + 1

    def leave(self, namespace: Hashable) -> None:
        """One member less; with the last, what the namespace has is dropped."""
        self._members[namespace] -= 1
        if not self._members[namespace]:
            del self._members[namespace]
            root = self._roots.pop(namespace, None)
            if root is not None:
                for page in list(root.children.values()):
                    self.drop(page)

    def alone(self, namespace: Hashable) -> bool:
        """Whether nobody else is a member."""
        return self._members[namespace] == 1

    # Paths

    def match(
        self, namespace: Hashable, tokens: Ints, most: int, path: list[CachedPage] | None = None
    ) -> list[CachedPage]:
        """The longest path that ``tokens`` begin with, of at most ``most`` pages. It is not used yet.

        :param path: its beginning, where that is known: it is gone on with.
        """
        path = [] if path is None else path
        page = path[-1] if path else self._roots.get(namespace)
        size, known = 4 * self.page_size, len(path)
        if page is None or not page.children or most <= known:
            return path
        data = tokens[known * self.page_size : most * self.page_size].tobytes()
        for begin in range(0, len(data) - size + 1, size):
            page = page.children.get(data[begin : begin + size])
            if page is None:
                break
            path.append(page)
        return path

    def new_uses(self, path: list[CachedPage]) -> int:
        """Pages of a path that nobody uses: those at its end."""
        count = len(path)
        while count and not path[count - 1].users:
            count -= 1
        return len(path) - count

    def use(self, path: list[CachedPage]) -> None:
        """One more user of each page of a path, from the root on."""
        for page in path:
            if not page.users:
                del self._idle[page]
            page.users += 1

    def unuse(self, path: list[CachedPage]) -> None:
        """One user less of each page of a path."""
        for page in reversed(path):
            page.users -= 1
            if not page.users:
                if page.parent is None:  # dropped meanwhile
                    self.pool.release([page.page])
                else:
                    self._idle[page] = None

    def grow(self, namespace: Hashable, path: list[CachedPage], tokens: Ints, pages: list[int]) -> bool:
        """Put pages that a row has filled behind its path, and on it.

        :param path: used by the row.
        :param tokens: [len(pages) * page_size], those in ``pages``.
        :returns: whether all are on the path now. It ends before the first whose tokens the tree has in another page.
        """
        parent = path[-1] if path else self.root(namespace)
        if path and parent.parent is None:
            return False
        size, data, known = 4 * self.page_size, tokens.tobytes(), len(path)
        for index, page in enumerate(pages):
            key = data[index * size : (index + 1) * size]
            if key in parent.children:
                break
            parent.children[key] = parent = CachedPage(parent, key, page, 1)
            path.append(parent)
        added = len(path) - known
        self._size += added
        self.pool.retain(pages[:added])
        return added == len(pages)

    def keep(self, namespace: Hashable, path: list[CachedPage], tokens: Ints, pages: list[int]) -> None:
        """Put the pages of a row that ends behind its path; those that the tree has in another page are left out.

        :param path: used by the row, which gives it up after this.
        :param tokens: [len(pages) * page_size], those in ``pages``.
        """
        parent = path[-1] if path else self.root(namespace)
        if path and parent.parent is None:
            return
        size, data = 4 * self.page_size, tokens.tobytes()
        for index, page in enumerate(pages):
            key = data[index * size : (index + 1) * size]
            known = parent.children.get(key)
            if known is None:
                known = parent.children[key] = CachedPage(parent, key, page, 1)
                self._size += 1
                self.pool.retain([page])
            else:
                self.use([known])
            path.append(known)
            parent = known

    # What goes

    def evict(self, count: int) -> int:
        """Free the idle pages used longest ago, ``count`` or as many as there are; how many that were."""
        done = min(count, len(self._idle))
        for _ in range(done):
            page, _ = self._idle.popitem(last=False)
            assert not page.children and not page.users and page.parent is not None
            del page.parent.children[page.key]
            page.parent = None
            self._size -= 1
            self.pool.release([page.page])
        return max(done, 0)

    def drop(self, page: CachedPage) -> None:
        """Take ``page`` and all behind it out of the tree. Those in use stay their users', and are free after them."""
        if page.parent is None:
            return
        del page.parent.children[page.key]
        left = [page]
        while left:
            page = left.pop()
            left += page.children.values()
            page.children = {}
            page.parent = None
            self._size -= 1
            if not page.users:
                del self._idle[page]
                self.pool.release([page.page])

    # Invariants

    def check(self) -> dict[int, int]:
        """Assert what must hold between any two calls; the users of each page in the tree."""
        users: dict[int, int] = {}
        idle = 0
        left = [*self._roots.values()]
        while left:
            parent = left.pop()
            for key, page in parent.children.items():
                assert page.parent is parent and page.key == key and len(key) == 4 * self.page_size
                assert not parent.page or parent.users >= page.users, "who uses a page uses all before it"
                assert page.page not in users, "a page is in the tree once"
                assert (page in self._idle) == (not page.users)
                assert page.users or self.pool.references(page.page) == 1, "only the cache holds an idle page"
                users[page.page] = page.users
                idle += not page.users
                left.append(page)
        assert len(users) == self._size and idle == len(self._idle)
        seen: set[CachedPage] = set()
        for page in self._idle:
            assert seen.issuperset(page.children.values()), "an idle page goes before its parent"
            seen.add(page)
        return users
