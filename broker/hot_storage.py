"""`HotStorage`: a storage for each term in which a replica of this broker leads its set.

A storage serves one term. It takes over the records that the replica kept warm, confirms when the replica's master
does, and is deposed, at once, when the term ends: nothing of it may reach the WAL again, not even when this broker is
elected anew. Closing it can take longer; a later term waits for that, so that one storage at a time uses the WAL.

Invariants: a storage is among `MasterStorages` only while its term lasts; it was deposed before the WAL has promised
another epoch (`ReplicaDuty` tells the end of a term first).

Entry: `HotStorage`, as the `DutyEvents` of a `ReplicaDuty`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidelog.broker.partitions.storages import MasterStorages
from tidelog.broker.replication.duty import DutyEvents
from tidelog.broker.replication.master import ReplicaMaster
from tidelog.broker.replication.replica import HotReplica
from tidelog.runtime.errors import Closed, Fenced, TidelogError
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.inputs import HandedWal
from tidelog.storage.storage import Storage

MakeTermStorage = Callable[[HandedWal], Storage]
"""Makes the storage of a term, with `LocalStreams` of the metadata; it is started here."""


async def _nothing_more(_storage: Storage) -> None:
    """Default `begun`: there is nothing to do before a storage serves."""


class HotStorage:
    """See the module. Used on the event loop's thread."""

    def __init__(
        self,
        replica: HotReplica,
        make: MakeTermStorage,
        storages: MasterStorages,
        failed: Callable[[BaseException], None],
        begun: Callable[[Storage], Awaitable[None]] = _nothing_more,
    ) -> None:
        """`failed`: a storage could not begin, or the duty has ended for good; this replica serves nothing more.

        `begun` is awaited when a storage has started, before it serves.
        """
        self._replica = replica
        self._make = make
        self._storages = storages
        self._failed = failed
        self._begun = begun
        self._turn = asyncio.Lock()
        self._tasks = TaskSet("hot-storage", failed)
        self._term = -1
        """The epoch that this replica leads; -1: none."""
        self.master: ReplicaMaster | None = None
        """That of the present term."""
        self.storage: Storage | None = None
        """That of the present term, once it serves."""
        self._deposed: list[Storage] = []
        """Those of earlier terms that were not closed yet."""
        self._closed = False

    def events(self) -> DutyEvents:
        """Return what the replica's duty calls."""
        return DutyEvents(leads=self.leads, ended=self.ended, failed=self._failed)

    def leads(self, epoch: int, master: ReplicaMaster) -> None:
        """Begin a storage for this epoch, in the background; none if this is being closed."""
        if self._closed:
            return
        assert self._term < 0, (self._term, epoch)
        self._term = epoch
        self.master = master
        self._tasks.spawn(self._begin(epoch, master), f"begin-{epoch}")

    def ended(self, epoch: int) -> None:
        """Depose the storage of this epoch at once, and close it in the background."""
        if self._term != epoch:
            return  # closed before
        self._term = -1
        self.master = None
        storage, self.storage = self.storage, None
        if storage is not None:
            storage.depose(
                Fenced(f"this broker's term as master of replica set {storage.replica_set_id} has ended: {epoch}")
            )
            self._storages.remove(storage.replica_set_id)
            self._deposed.append(storage)
            self._tasks.spawn(self._close_deposed(), f"close-{epoch}")

    async def _begin(self, epoch: int, master: ReplicaMaster) -> None:
        async with self._turn:
            if self._term != epoch:
                return  # it has ended while an earlier storage was being closed
            tail = self._replica.hand_over()
            storage = self._make(
                HandedWal(tail.records, tail.cache, master.confirm, master.gate, master.check_writable, master.durable)
            )
            try:
                await storage.start(epoch)
                await self._begun(storage)
            except TidelogError as error:
                await storage.close(upload=False)
                if self._term == epoch and not isinstance(error, Fenced | Closed):
                    self._failed(error)
                return
            if self._term != epoch:  # it has ended meanwhile
                await storage.close(upload=False)
                return
            self.storage = storage
            self._storages.add(storage)
            storage.recovered_done()  # streams that are opened later are known by the metadata

    async def _close_deposed(self) -> None:
        async with self._turn:
            while self._deposed:
                await self._deposed[0].close(upload=False)
                del self._deposed[0]

    def wal_failed(self, error: Exception) -> None:
        """The WAL has failed: nothing more is acknowledged. For `ReplicaEvents.wal_failed`."""
        if self.storage is not None:
            self.storage.wal_failed(error)

    async def close(self, *, upload: bool) -> None:
        """End; call it before the duty is closed. With `upload`, first upload everything confirmed, while it leads.

        May be called again, also after it was cancelled: the storage is kept until it is closed.
        """
        self._closed = True
        self._term = -1
        self.master = None
        async with self._turn:
            if self.storage is not None:
                await self.storage.close(upload=upload)
                self._storages.remove(self.storage.replica_set_id)
                self.storage = None
        await self._close_deposed()
        await self._tasks.close()
