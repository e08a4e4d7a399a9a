"""`SingleWal`: the WAL of a broker's own replica set while that has one member, and its storage.

The broker is elected without promises, recovers its WAL, judges it by what the controllers know of it, and serves. What
a replicated WAL does instead is in `tidelog.broker.hot_set`.

Entry: `SingleWal.begin`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tidelog.broker.base import BrokerBase
from tidelog.broker.membership import BrokerMembership
from tidelog.broker.partitions.storages import MasterStorages
from tidelog.broker.wal_files import missing_wal_files
from tidelog.broker.wal_keeper import WalKeeper, meet_known_wal
from tidelog.controller.model.levels import REPLICATION_LEVEL
from tidelog.runtime.errors import TidelogError
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import Wal

logger = logging.getLogger(__name__)


class SingleWal:
    """See the module."""

    def __init__(self, base: BrokerBase, wal: Wal, storage: Storage, storages: MasterStorages) -> None:
        """`storage`: of the WAL; nothing runs yet."""
        self._base = base
        self._storages = storages
        self.wal = wal
        self.storage = storage
        self.keeper = WalKeeper(base.broker_id, base.wal, base.controller, wal, storage, base.world.clock)

    async def begin(self, membership: BrokerMembership) -> int:
        """Become master of the replica set, and serve; return the new master epoch.

        Raises `WalLost`, `CorruptData`, `Fenced`, `WalFailed` and the errors of the controllers.
        """
        base, storage = self._base, self.storage
        master_epoch = await membership.elect()
        await storage.recover()
        await meet_known_wal(
            base.broker_id, base.wal, base.controller, self.wal, master_epoch, start_over=storage.start_over
        )
        await storage.start(master_epoch)
        await self.keeper.begin(master_epoch)
        self._storages.add(storage)
        return master_epoch

    def problems(self) -> list[str]:
        """Return what an operator should know of it, one sentence each."""
        wanted, me = self._wanted(), self._base.broker_id
        found = missing_wal_files(me, me, self.wal.missing_files)
        if wanted > 1:
            found += [f"replica set {me} is to have {wanted} replicas: that begins when broker {me} is started again"]
        return found

    def _wanted(self) -> int:
        """How many replicas the set is to have from the next start on."""
        image = self._base.image()
        row = image.replication.get(self._base.broker_id)
        if image.level < REPLICATION_LEVEL:  # none could begin at any start
            return 1
        return row.policy.total_replicas if row is not None else self._base.settings.replication.total_replicas

    def master_status(self) -> dict[str, Any] | None:
        """Return what `ReplicaMaster.status` tells of a set of several, of this set of one; None before it serves."""
        storage, wal, me = self.storage, self.wal, self._base.broker_id
        if storage.master_epoch < 0:
            return None
        record = self._base.image().replica_sets.get(me)
        return {
            "epoch": storage.master_epoch,
            "confirm_offset": storage.confirm_offset,
            "end_offset": wal.end_offset,
            "durable_offset": wal.durable_offset,
            "committed_offset": storage.committed_offset,
            "sync_state_set": [me],
            "sync_state_epoch": record.sync_state_set_epoch if record is not None else -1,
            "total_replicas": self._wanted(),
            "quorum": 1,
            "need": 1,
            "in_sync": [me],
            "changing": False,
            "degraded": False,
            "refusal": "",
            "followers": [],
        }

    async def close(self, budget_s: float, *, upload: bool) -> None:
        """Upload what is confirmed, within the budget, and close; valid after a start that failed."""
        try:
            async with asyncio.timeout(budget_s):
                await self.storage.close(upload=upload)
        except (TimeoutError, TidelogError) as error:
            logger.warning(
                "the last upload did not finish; the rest stays in the WAL and is uploaded after the next start",
                extra={"error": str(error) or "time is up"},
            )
            await self.storage.close(upload=False)
        await self.keeper.close(report=upload)
