"""An LRU cache bounded by bytes, and a table that merges concurrent requests for the same key.

`ByteLru` holds data blocks and object indexes, each charged its memory including Python's overhead. `Flights`
ensures that concurrent readers of a key share one fetch; a cancelled reader does not affect the others.

Entry: `ByteLru`, `Flights`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from tidelog.runtime.errors import TidelogError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_OVERHEAD_BYTES = 256
"""The cache's own memory per entry: key tuple, dictionary slot, links."""


class Extent:
    """A buffer that several entries are views of: it stays in memory as long as one of the entries does."""

    __slots__ = ("members", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.members = 0
        """Cached entries that are views of it."""


class _CachedItem(NamedTuple, Generic[V]):
    value: V
    size: int
    extent: Extent | None


class ByteLru(Generic[K, V]):
    """Evicts entries marked as spent first, then the least recently used.

    Spent are the blocks that a sequential reader has passed, so that a replay does not evict blocks that other readers
    use repeatedly. A value larger than the bound is not cached.

    An extent is charged in full while any of its entries is cached: `bytes` is the memory actually held.
    """

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._entries: OrderedDict[K, _CachedItem[V]] = OrderedDict()
        self._spent: OrderedDict[K, _CachedItem[V]] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._spent)

    def __contains__(self, key: K) -> bool:
        return key in self._entries or key in self._spent

    def get(self, key: K) -> V | None:
        """Return the value and make it the most recently used of its kind; None if it is not cached."""
        for entries in (self._entries, self._spent):
            entry = entries.get(key)
            if entry is not None:
                self.hits += 1
                entries.move_to_end(key)
                return entry.value
        self.misses += 1
        return None

    def put(self, key: K, value: V, size: int, extent: Extent | None = None) -> None:
        """Cache `value`, of `size` bytes of memory in addition to its extent, and evict others until it fits."""
        self.discard(key)
        size += ENTRY_OVERHEAD_BYTES
        if size + (extent.size if extent is not None else 0) > self._bound_bytes:
            return
        self._entries[key] = _CachedItem(value, size, extent)
        self.bytes += size
        if extent is not None:
            if extent.members == 0:
                self.bytes += extent.size
            extent.members += 1
        while self.bytes > self._bound_bytes:
            self._left((self._spent or self._entries).popitem(last=False)[1])

    def spend(self, key: K) -> None:
        """Mark an entry as unlikely to be read again: spent entries are evicted first, in the order of marking."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._spent[key] = entry

    def discard(self, key: K) -> None:
        """Remove one entry, if it is cached."""
        entry = self._entries.pop(key, None) or self._spent.pop(key, None)
        if entry is not None:
            self._left(entry)

    def _left(self, entry: _CachedItem[V]) -> None:
        self.bytes -= entry.size
        extent = entry.extent
        if extent is not None:
            extent.members -= 1
            if extent.members == 0:
                self.bytes -= extent.size


class Flights(Generic[K, V]):
    """Work in flight by key. Futures hold errors as results, so an error that is never awaited logs no warning."""

    def __init__(self) -> None:
        self._futures: dict[K, asyncio.Future[V | TidelogError]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def __contains__(self, key: K) -> bool:
        return key in self._futures

    def join(self, key: K) -> asyncio.Future[V | TidelogError] | None:
        """Return the flight of `key`, if there is one. Wait for it with `outcome`."""
        return self._futures.get(key)

    def open(self, key: K) -> asyncio.Future[V | TidelogError]:
        """Begin a flight; the caller must `land` it."""
        assert key not in self._futures
        future: asyncio.Future[V | TidelogError] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        return future

    def land(self, key: K, result: V | TidelogError) -> None:
        """End a flight with a value or an error; no effect if it has ended already."""
        future = self._futures.pop(key, None)
        if future is not None and not future.done():
            future.set_result(result)

    def land_all(self, error: TidelogError) -> None:
        """End every flight with this error: no task remains to land them."""
        for key in list(self._futures):
            self.land(key, error)

    @staticmethod
    async def outcome(future: asyncio.Future[V | TidelogError]) -> V:
        """Return the value, or raise the error. Cancelling the caller leaves the flight alone."""
        result = await asyncio.shield(future)
        if isinstance(result, TidelogError):
            raise result
        return result
