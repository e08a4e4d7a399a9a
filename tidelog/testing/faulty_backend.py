"""A bucket with the faults that a test asked for, between a broker and its object store.

It stands where the S3 client would: a request that is answered with 429 or 5xx is repeated within
`s3.retry_budget_ms`, as that client does, and only then is the bucket `Unavailable`; 403 is refused at once. So a
bucket that fails for seconds delays uploads and reads, and does not break them.

Entry: `FaultyBackend`.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import AsyncIterator, Sequence

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.accounts import Account, Receipt
from tidelog.storage.bucket.common import StoreAccessDenied
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.stats import StoreStats
from tidelog.storage.bucket.store import Backend, ObjectInfo, StoreCapabilities, UnfinishedUpload, View
from tidelog.testing.bucket_faults import REFUSED
from tidelog.testing.fault_board import FaultBoard

FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 1.0


class FaultyBackend:
    """A `Backend` of one broker, with the faults of `board` in front of another one."""

    def __init__(
        self, backend: Backend, board: FaultBoard, node_id: int, clock: Clock, rng: random.Random, budget_s: float
    ) -> None:
        self._backend = backend
        self._board = board
        self._node_id = node_id
        self._clock = clock
        self._rng = rng
        self._budget_s = budget_s

    def _over(self, backend: Backend) -> FaultyBackend:
        return FaultyBackend(backend, self._board, self._node_id, self._clock, self._rng, self._budget_s)

    async def _strike(self, operation: str, key: str) -> None:
        """Return when the request may go on. Raises `Unavailable`, `StoreAccessDenied`."""
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, self._rng)
        give_up = self._clock.monotonic() + self._budget_s
        while (rule := self._board.rule).strikes(operation):
            self._board.count_struck(self._node_id)
            if rule.status == 0:
                await self._clock.sleep(rule.delay_s)
                return
            what = f"{operation} {key} in {self.url} returned {rule.status}, as the test wants it"
            if rule.status == REFUSED:
                raise StoreAccessDenied(what)
            delay_s = backoff.next_delay_s()
            if self._clock.monotonic() + delay_s > give_up:
                raise Unavailable(what)
            await self._clock.sleep(delay_s)

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._backend.url

    @property
    def stats(self) -> StoreStats:
        """See `ObjectStore.stats`."""
        return self._backend.stats

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        await self._strike("put", key)
        return await self._backend.put(key, body, if_absent=if_absent)

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        await self._strike("get", key)
        return await self._backend.get(key)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """See `ObjectStore.get_ranges`."""
        await self._strike("get", key)
        return await self._backend.get_ranges(key, ranges)

    async def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        await self._strike("head", key)
        return await self._backend.head(key)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        await self._strike("list", prefix)
        async for info in self._backend.list(prefix, start_after=start_after):
            yield info

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        await self._strike("delete", keys[0] if keys else "")
        await self._backend.delete(keys)

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """See `ObjectStore.unfinished`."""
        await self._strike("list", prefix)
        return await self._backend.unfinished(prefix)

    async def abort(self, upload: UnfinishedUpload) -> None:
        """See `ObjectStore.abort`."""
        await self._strike("delete", upload.key)
        await self._backend.abort(upload)

    async def probe(self) -> StoreCapabilities:
        """See `ObjectStore.probe`."""
        await self._strike("put", "")
        return await self._backend.probe()

    async def close(self) -> None:
        """See `ObjectStore.close`."""
        await self._backend.close()

    def for_purpose(self, purpose: Purpose) -> FaultyBackend:
        """See `ObjectStore.for_purpose`: `GuardedObjectStore` keeps purposes."""
        return self

    def with_receipt(self) -> tuple[FaultyBackend, Receipt]:
        """See `ObjectStore.with_receipt`: `GuardedObjectStore` gives receipts."""
        return self, Receipt()

    def with_account(self, account: Account) -> FaultyBackend:
        """See `Backend.with_account`."""
        return self._over(self._backend.with_account(account))
