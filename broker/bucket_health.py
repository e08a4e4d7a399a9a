"""When the bucket last answered, and how it last failed: what `/status` says about it.

`WatchedObjectStore` stands before any object store and notes the outcome of every call. "No such object" and "exists
already" are answers; a bucket that says so is healthy.

Entry: `WatchedObjectStore`.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from runtime.clock import Clock
from runtime.errors import AlreadyExists, InvalidInput, NotFound, TidelogError
from storage.bucket_accounts import Receipt
from storage.object_store import Buffer, ObjectInfo, ObjectStore, StoreCapabilities, UnfinishedUpload, View
from storage.object_store_stats import MeasuredObjectStore, StoreStats
from storage.purpose import Purpose, PurposefulStore, gives_receipts


class BucketHealth:
    """The last success and the last failure. Times are milliseconds since the Unix epoch, 0 for never."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.last_success_ms = 0
        self.last_error_ms = 0
        self.last_error = ""
        self.failures_in_a_row = 0

    def succeeded(self, now_ms: int) -> None:
        """The bucket answered."""
        self.last_success_ms = now_ms
        self.failures_in_a_row = 0

    def failed(self, now_ms: int, error: Exception) -> None:
        """A call failed for good: its retry budget is used up."""
        self.last_error_ms = now_ms
        self.last_error = str(error)
        self.failures_in_a_row += 1

    def report(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "url": self.url,
            "healthy": self.failures_in_a_row == 0,
            "last_success_ms": self.last_success_ms or None,
            "last_error_ms": self.last_error_ms or None,
            "last_error": self.last_error or None,
            "failures_in_a_row": self.failures_in_a_row,
        }


class WatchedObjectStore:
    """An object store whose health is watched. See `ObjectStore` for the methods."""

    def __init__(self, store: MeasuredObjectStore, clock: Clock, health: BucketHealth | None = None) -> None:
        self._store = store
        self._clock = clock
        self.health = health or BucketHealth(store.url)

    def for_purpose(self, purpose: Purpose) -> ObjectStore:
        """See `PurposefulStore.for_purpose`; the health of all views is one."""
        if not isinstance(self._store, PurposefulStore):
            return self
        return WatchedObjectStore(self._store.for_purpose(purpose), self._clock, self.health)

    def with_receipt(self) -> tuple[WatchedObjectStore, Receipt]:
        """See `ReceiptStore.with_receipt`."""
        if not gives_receipts(self._store):
            return self, Receipt()
        store, receipt = self._store.with_receipt()
        return WatchedObjectStore(store, self._clock, self.health), receipt

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._store.url

    @property
    def stats(self) -> StoreStats:
        """The figures of the store behind."""
        return self._store.stats

    @contextmanager
    def _watch(self) -> Iterator[None]:
        try:
            yield
        except (NotFound, AlreadyExists):
            self.health.succeeded(self._clock.time_ms())
            raise
        except InvalidInput:
            raise
        except TidelogError as error:
            self.health.failed(self._clock.time_ms(), error)
            raise
        else:
            self.health.succeeded(self._clock.time_ms())

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        with self._watch():
            return await self._store.put(key, body, if_absent=if_absent)

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        with self._watch():
            return await self._store.get(key)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """See `ObjectStore.get_ranges`."""
        with self._watch():
            return await self._store.get_ranges(key, ranges)

    async def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        with self._watch():
            return await self._store.head(key)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        with self._watch():
            async for info in self._store.list(prefix, start_after=start_after):
                yield info

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        with self._watch():
            await self._store.delete(keys)

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """See `ObjectStore.unfinished`."""
        with self._watch():
            return await self._store.unfinished(prefix)

    async def abort(self, upload: UnfinishedUpload) -> None:
        """See `ObjectStore.abort`."""
        with self._watch():
            await self._store.abort(upload)

    async def probe(self) -> StoreCapabilities:
        """See `ObjectStore.probe`."""
        with self._watch():
            return await self._store.probe()

    async def close(self) -> None:
        """See `ObjectStore.close`."""
        await self._store.close()
