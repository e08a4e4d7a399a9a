"""Who may talk to the bucket next: requests in flight are bounded, and the urgent ones go first.

Purposes fall into four ranks: the WAL and tail reads, uploads, cold reads, compaction with all that can wait. A request
enters when

- fewer than `slots` requests are in flight altogether, and
- of its own rank and the less urgent ones together, fewer than the rank's share of the slots are.

So the less urgent ranks can never fill the connections: a WAL object finds one free at once, whatever a replay and
compaction do. Those who wait enter by rank, then in order; but every `TURN_EVERY`th entry goes to the least urgent rank
that may enter, so that none starves however busy the others are.

Entry: `GatedObjectStore`; the rule alone, which does no I/O, is `PriorityGate`.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from storage.bucket_accounts import Receipt
from storage.object_store import Buffer, ObjectInfo, StoreCapabilities, UnfinishedUpload, View
from storage.object_store_stats import MeasuredObjectStore, StoreStats
from storage.purpose import Purpose, keeps_accounts

RANKS: Final = {
    Purpose.WAL: 0,
    Purpose.TAIL: 0,
    Purpose.UPLOAD: 1,
    Purpose.COLD: 2,
    Purpose.COMPACTION: 3,
    Purpose.CLEAN: 3,
    Purpose.OTHER: 3,
}
_SHARES: Final = (1.0, 0.875, 0.75, 0.25)
"""Of the slots, for each rank with all that are less urgent."""
TURN_EVERY: Final = 16


class PriorityGate:
    """The slots and the queues. Used on one event loop."""

    def __init__(self, slots: int) -> None:
        assert slots >= 1
        self._slots = slots
        self._caps = [max(1, int(slots * share)) for share in _SHARES]
        self._in_flight = [0] * len(_SHARES)
        self._waiting: list[deque[asyncio.Future[None]]] = [deque() for _ in _SHARES]
        self._entries = 0
        self.waits = 0
        """Requests that had to wait."""

    @property
    def in_flight(self) -> int:
        """Requests that have entered and not left."""
        return sum(self._in_flight)

    @property
    def waiting(self) -> int:
        """Requests that wait, those whose caller has gone included."""
        return sum(map(len, self._waiting))

    def _has_room(self, rank: int) -> bool:
        return sum(self._in_flight) < self._slots and sum(self._in_flight[rank:]) < self._caps[rank]

    async def enter(self, purpose: Purpose) -> None:
        """Wait for a slot; `leave` gives it back. Cancelling the wait takes none."""
        rank = RANKS[purpose]
        queue = self._waiting[rank]
        if not queue and self._has_room(rank):
            self._in_flight[rank] += 1
            return
        self.waits += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._admit()  # it may have stood before one that has room
            else:
                self.leave(purpose)
            raise

    def leave(self, purpose: Purpose) -> None:
        """Give a slot back and let in who may enter now."""
        rank = RANKS[purpose]
        self._in_flight[rank] -= 1
        assert self._in_flight[rank] >= 0
        self._admit()

    def _admit(self) -> None:
        while (rank := self._next_rank()) is not None:
            self._in_flight[rank] += 1
            self._entries += 1
            self._waiting[rank].popleft().set_result(None)

    def _next_rank(self) -> int | None:
        ready = []
        for rank, queue in enumerate(self._waiting):
            while queue and queue[0].done():  # its caller was cancelled
                queue.popleft()
            if queue and self._has_room(rank):
                ready.append(rank)
        if not ready:
            return None
        return ready[-1] if self._entries % TURN_EVERY == TURN_EVERY - 1 else ready[0]


class GatedObjectStore:
    """An object store behind a gate; what it was made for is `Purpose.OTHER` until `for_purpose` says otherwise.

    Retries inside the store behind keep their slot: a bucket that is slow or refuses is asked less, not more.
    """

    def __init__(self, store: MeasuredObjectStore, gate: PriorityGate, purpose: Purpose = Purpose.OTHER) -> None:
        self._store = store
        self._purpose = purpose
        self.gate = gate

    def for_purpose(self, purpose: Purpose) -> GatedObjectStore:
        """See `PurposefulStore.for_purpose`. What it asks is on the purpose's account."""
        store = self._store
        if keeps_accounts(store):
            view = store.with_account(store.stats.accounts.account(purpose.value))
            return GatedObjectStore(view, self.gate, purpose)
        return GatedObjectStore(store, self.gate, purpose)

    def with_receipt(self) -> tuple[GatedObjectStore, Receipt]:
        """See `ReceiptStore.with_receipt`."""
        store = self._store
        if not keeps_accounts(store):
            return self, Receipt()
        receipt = Receipt(store.stats.accounts, self._purpose.value)
        return GatedObjectStore(store.with_account(receipt), self.gate, self._purpose), receipt

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._store.url

    @property
    def stats(self) -> StoreStats:
        """The figures of the store behind. Waiting at the gate is not in its latencies."""
        return self._store.stats

    @contextmanager
    def _entered(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.gate.leave(self._purpose)

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`. A multipart upload is one entry."""
        await self.gate.enter(self._purpose)
        with self._entered():
            return await self._store.put(key, body, if_absent=if_absent)

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        await self.gate.enter(self._purpose)
        with self._entered():
            return await self._store.get(key)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """See `ObjectStore.get_ranges`."""
        await self.gate.enter(self._purpose)
        with self._entered():
            return await self._store.get_ranges(key, ranges)

    async def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        await self.gate.enter(self._purpose)
        with self._entered():
            return await self._store.head(key)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """See `ObjectStore.list`. A slot is held while the store is asked, not while the caller looks at an answer."""
        found = self._store.list(prefix, start_after=start_after)
        while True:
            await self.gate.enter(self._purpose)
            with self._entered():
                info = await anext(found, None)
            if info is None:
                return
            yield info

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        await self.gate.enter(self._purpose)
        with self._entered():
            await self._store.delete(keys)

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """See `ObjectStore.unfinished`."""
        await self.gate.enter(self._purpose)
        with self._entered():
            return await self._store.unfinished(prefix)

    async def abort(self, upload: UnfinishedUpload) -> None:
        """See `ObjectStore.abort`."""
        await self.gate.enter(self._purpose)
        with self._entered():
            await self._store.abort(upload)

    async def probe(self) -> StoreCapabilities:
        """See `ObjectStore.probe`."""
        await self.gate.enter(self._purpose)
        with self._entered():
            return await self._store.probe()

    async def close(self) -> None:
        """See `ObjectStore.close`. Closes the bucket for all views; the owner alone calls it."""
        await self._store.close()
