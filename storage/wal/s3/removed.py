"""`RemovedWal`: ends the WAL in the bucket of a broker that is removed, and deletes what nobody needs of it.

The broker's process may be alive: paused, or cut off from the controllers alone. What stops it is the object at its
next place, so no fence is ever deleted (rule 14). The log ends with one more fence, its tombstone: it carries the last
master epoch that the controllers gave for this replica set, and lets the log start over at the committed WAL offset. A
broker that gets the id later finds the tombstone as the whole log and goes on behind it, under a larger epoch.

Invariants:
1. A fence is created only at the hole of a log that has seen no master epoch above the given one. Who is elected
   later creates its own fence at that same place, so one of the two fails; the log of a newer writer is never ended.
2. Only objects that no reader of the log needs are deleted, and no fence.

Entry: `RemovedWal.fence`, `RemovedWal.clear`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import TypeVar

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Fenced, Unavailable
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.wal.base import WalFailed
from tidelog.storage.wal.s3.chain import Chain
from tidelog.storage.wal.s3.format import WRITER_ID_BYTES, Origin, wal_prefix
from tidelog.storage.wal.s3.recovery import BucketLog, Created

_T = TypeVar("_T")

_WAIT_S = 60.0
"""How long a bucket that does not answer is waited for."""
_ATTEMPTS = 20
"""A drained broker writes next to nothing, so the hole is found long before this."""


class RemovedWal:
    """The WAL of one broker, seen by the broker that removes it. `rng` as for `tidelog.storage.wal.s3.wal.S3Wal`."""

    def __init__(
        self, store: ObjectStore, cluster_id: str, replica_set_id: int, clock: Clock, rng: random.Random
    ) -> None:
        self._bucket = BucketLog(store, wal_prefix(cluster_id, replica_set_id), replica_set_id, clock, rng)
        self._replica_set_id = replica_set_id
        self._writer_id = rng.getrandbits(8 * WRITER_ID_BYTES).to_bytes(WRITER_ID_BYTES, "big")

    async def fence(self, master_epoch: int) -> None:
        """Shut out every writer older than `master_epoch`, which must have ended, or whose holder is the caller.

        Nothing is deleted, and what is in the log stays in it. Raises `CorruptData`, `Unavailable`.
        """
        await self._bounded(self._fence(master_epoch))

    async def clear(self, master_epoch: int, start_offset: int) -> int:
        """Put the tombstone and delete all objects that are not fences; return their number.

        To be called when the controllers have removed the broker. `master_epoch` was its replica set's last one, and
        `start_offset` is the committed WAL offset. If a newer writer is found, that one's log is left as it is. Raises
        `CorruptData`, after which nothing is deleted, and `Unavailable`.
        """
        return await self._bounded(self._clear(master_epoch, start_offset))

    async def sweep(self) -> int:
        """Delete what an interrupted `clear` left, and no object that a reader needs; return the number of objects."""
        return await self._bounded(self._sweep())

    async def _bounded(self, work: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(_WAIT_S):
                return await work
        except TimeoutError:
            raise Unavailable(
                f"the bucket did not let the WAL of broker {self._replica_set_id} be fenced within {_WAIT_S:g} s",
                hint="repeat the subcommand when the bucket answers",
            ) from None

    async def _fence(self, master_epoch: int) -> Chain:
        chain = await self._bucket.resolve()
        if chain.objects and chain.epoch < master_epoch:
            origin = Origin(self._replica_set_id, master_epoch, self._writer_id)
            try:
                chain = await self._bucket.plant(origin, chain, -1, lambda _longer: None)
            except (Fenced, WalFailed):  # somebody as new or newer was there, who has shut out the older ones
                chain = await self._bucket.resolve()
        return chain

    async def _clear(self, master_epoch: int, start_offset: int) -> int:
        chain = await self._fence(master_epoch)
        origin = Origin(self._replica_set_id, master_epoch, self._writer_id)
        attempts = 0
        while chain.objects and chain.epoch <= master_epoch:
            if await self._bucket.end(origin, chain, start_offset) is Created.OURS:
                break
            attempts += 1
            if attempts == _ATTEMPTS:
                raise Unavailable(
                    f"the process of broker {self._replica_set_id} goes on writing into its WAL",
                    hint="stop it, then repeat the subcommand",
                )
            chain = await self._bucket.resolve()
        return await self._sweep()

    async def _sweep(self) -> int:
        leftovers = self._bucket.leftovers(await self._bucket.resolve())
        await self._bucket.delete(leftovers)
        return len(leftovers)
