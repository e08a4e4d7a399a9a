"""`MemoryObjectStore`: a bucket in a dictionary, for tests and for set-ups that rely on replication alone.

Invariant: no operation has a suspension point, so each is atomic on the event loop.

Entry: `MemoryObjectStore`.
"""

from __future__ import annotations

import bisect
import builtins
from collections.abc import AsyncIterator, Sequence

from tidelog.runtime.clock import Clock, SystemClock
from tidelog.runtime.errors import Closed
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.common import PlainViews, check_key, check_ranges, past_end, probe_store
from tidelog.storage.bucket.stats import StoreStats
from tidelog.storage.bucket.store import (
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    StoreCapabilities,
    UnfinishedUpload,
    View,
)


class MemoryObjectStore(PlainViews):
    """An `ObjectStore` whose contents are lost when the process ends."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._bodies: dict[str, bytes] = {}
        self._infos: dict[str, ObjectInfo] = {}
        self._keys: list[str] = []  # sorted; code point order is the order of UTF-8 bytes
        self._version = 0
        self._closed = False
        self.stats = StoreStats(self._clock)

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return "memory://"

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the memory object store is closed")

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        self._check_open()
        check_key(key)
        with self.stats.measure("put") as stats:
            if key not in self._bodies:
                bisect.insort(self._keys, key)
            elif if_absent:
                raise ObjectExists(f"object {key} exists in {self.url}")
            data = b"".join(body)
            self._version += 1
            info = ObjectInfo(key, len(data), f"{self._version:016x}", self._clock.time_ms())
            self._bodies[key] = data
            self._infos[key] = info
            stats.bytes_out += len(data)
            return info

    def keys(self) -> list[str]:
        """Return all keys, in the order of `list`."""
        return list(self._keys)

    def body(self, key: str) -> bytes:
        """Return an object at once, without a request that is counted. Raises `ObjectNotFound`."""
        self._check_open()
        check_key(key)
        body = self._bodies.get(key)
        if body is None:
            raise ObjectNotFound(f"object {key} does not exist in {self.url}")
        return body

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        with self.stats.measure("get") as stats:
            body = self.body(key)
            stats.bytes_in += len(body)
            return body

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """See `ObjectStore.get_ranges`."""
        with self.stats.measure("get_ranges") as stats:
            check_ranges(key, ranges)
            body = self.body(key)
            for start, end in ranges:
                if end > len(body):
                    raise past_end(key, start, end)
            parts: list[View] = [body[start:end] for start, end in ranges]
            stats.bytes_in += sum(map(len, parts))
            return parts

    async def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        with self.stats.measure("head"):
            self.body(key)
            return self._infos[key]

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """See `ObjectStore.list`. A change while the iteration is suspended may or may not be seen."""
        self._check_open()
        with self.stats.measure("list"):
            last = start_after
            at = max(bisect.bisect_left(self._keys, prefix), bisect.bisect_right(self._keys, last))
        while at < len(self._keys) and self._keys[at].startswith(prefix):
            last = self._keys[at]
            yield self._infos[last]
            at = bisect.bisect_right(self._keys, last)

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        self._check_open()
        with self.stats.measure("delete"):
            for key in keys:
                if self._bodies.pop(check_key(key), None) is not None:
                    del self._infos[key]
                    del self._keys[bisect.bisect_left(self._keys, key)]

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """See `ObjectStore.unfinished`: a memory store has none."""
        return []

    async def abort(self, upload: UnfinishedUpload) -> None:
        """See `ObjectStore.abort`."""

    async def probe(self) -> StoreCapabilities:
        """See `ObjectStore.probe`."""
        return await probe_store(self, "the memory store")

    async def close(self) -> None:
        """See `ObjectStore.close`."""
        self._closed = True
