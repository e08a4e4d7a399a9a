"""A cache bounded by bytes that evicts what was used least recently, and a table of work in flight.

`ByteLru` holds data blocks and object indexes, each with the memory it costs, Python's overhead included. `Flights`
makes sure that what several readers ask for at once is fetched once; a reader that goes away disturbs no other.

Entry: `ByteLru`, `Flights`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from runtime.errors import TidelogError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_OVERHEAD_BYTES = 256
"""What the cache itself spends on an entry: key tuple, dictionary slot, links."""


class Extent:
    """Bytes that several entries are views of: they are in memory as long as one of the entries is."""

    __slots__ = ("members", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.members = 0
        """Entries of the cache that lie in it."""


class _Entry(NamedTuple, Generic[V]):
    value: V
    size: int
    extent: Extent | None


class ByteLru(Generic[K, V]):
    """Least recently used goes first, but what was marked as spent before everything else.

    Spent are the blocks that a sequential reader has behind it: a replay of all history so passes through without
    driving out what others come back for. What alone is larger than the bound is not kept.

    An extent is accounted for in full while any of its entries is here: `bytes` is what is really held.
    """

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._spent: OrderedDict[K, _Entry[V]] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._spent)

    def __contains__(self, key: K) -> bool:
        return key in self._entries or key in self._spent

    def get(self, key: K) -> V | None:
        """The value, now the most recently used of its kind; None when it is not here."""
        for entries in (self._entries, self._spent):
            entry = entries.get(key)
            if entry is not None:
                self.hits += 1
                entries.move_to_end(key)
                return entry.value
        self.misses += 1
        return None

    def put(self, key: K, value: V, size: int, extent: Extent | None = None) -> None:
        """Keep `value`, which costs `size` bytes of memory beside its extent, and evict others until it fits."""
        self.discard(key)
        size += ENTRY_OVERHEAD_BYTES
        if size + (extent.size if extent is not None else 0) > self._bound_bytes:
            return
        self._entries[key] = _Entry(value, size, extent)
        self.bytes += size
        if extent is not None:
            if extent.members == 0:
                self.bytes += extent.size
            extent.members += 1
        while self.bytes > self._bound_bytes:
            self._left((self._spent or self._entries).popitem(last=False)[1])

    def spend(self, key: K) -> None:
        """This entry is not likely to be asked for again: it goes before the others, in the order of spending."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._spent[key] = entry

    def discard(self, key: K) -> None:
        """Forget one entry, if it is here."""
        entry = self._entries.pop(key, None) or self._spent.pop(key, None)
        if entry is not None:
            self._left(entry)

    def _left(self, entry: _Entry[V]) -> None:
        self.bytes -= entry.size
        extent = entry.extent
        if extent is not None:
            extent.members -= 1
            if extent.members == 0:
                self.bytes -= extent.size


class Flights(Generic[K, V]):
    """Work in flight by key. A future holds the value or the error, so that one nobody awaits is no complaint."""

    def __init__(self) -> None:
        self._futures: dict[K, asyncio.Future[V | TidelogError]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def __contains__(self, key: K) -> bool:
        return key in self._futures

    def join(self, key: K) -> asyncio.Future[V | TidelogError] | None:
        """The flight of `key`, if there is one. Wait for it with `outcome`."""
        return self._futures.get(key)

    def open(self, key: K) -> asyncio.Future[V | TidelogError]:
        """Begin a flight; whoever opens it must land it."""
        assert key not in self._futures
        future: asyncio.Future[V | TidelogError] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        return future

    def land(self, key: K, result: V | TidelogError) -> None:
        """End a flight with a value or an error; one that has landed already stays as it is."""
        future = self._futures.pop(key, None)
        if future is not None and not future.done():
            future.set_result(result)

    def land_all(self, error: TidelogError) -> None:
        """End every flight by this error: nobody is left to land them."""
        for key in list(self._futures):
            self.land(key, error)

    @staticmethod
    async def outcome(future: asyncio.Future[V | TidelogError]) -> V:
        """The value, or raise the error. Cancelling the waiter leaves the flight alone."""
        result = await asyncio.shield(future)
        if isinstance(result, TidelogError):
            raise result
        return result
