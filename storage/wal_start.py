"""How a storage takes its WAL into use: what must hold between the WAL and the committed offset, and its epoch.

The WAL holds everything from the committed WAL offset on. One that begins later has lost bytes that are in no object;
one that ends earlier has nothing that is needed, and a single member begins it anew there. The WAL of several replicas
never ends earlier: what is committed was confirmed, and who was elected has every confirmed byte (rule 8).

Entry: `meet`, `enter_epoch`.
"""

from __future__ import annotations

import logging
import random

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData
from tidelog.storage.wal.base import Wal, WalFull

logger = logging.getLogger(__name__)


async def meet(wal: Wal, replica_set_id: int, committed: int, *, is_handed: bool) -> None:
    """Ensure that the WAL covers everything from the committed offset on.

    `is_handed`: it is the WAL of a replica that leads, which is never begun anew. Raises `CorruptData`, `WalFailed`.
    """
    if wal.start_offset > committed:
        raise CorruptData(
            f"the WAL of replica set {replica_set_id} starts at {wal.start_offset}, "
            f"but only {committed} is committed: the bytes between are in neither",
            hint="is this the data directory of another cluster, or was the controller restored from a backup?",
        )
    if wal.end_offset >= committed:
        return
    if is_handed:
        raise CorruptData(
            f"the WAL of replica set {replica_set_id} ends at {wal.end_offset}, and {committed} is committed",
            hint="the master that was elected lacks confirmed bytes: keep the directories of all members",
        )
    fields = {"replica_set": replica_set_id, "wal_end": wal.end_offset, "committed": committed}
    logger.warning("the WAL ends before the committed WAL offset, restarting it there", extra=fields)
    await wal.reset(committed)


async def enter_epoch(wal: Wal, master_epoch: int, clock: Clock, rng: random.Random) -> None:
    """Begin the master epoch; waits while the WAL has no room for it. Raises `Fenced`, `WalFailed`."""
    backoff = Backoff(0.05, 5.0, rng)
    while True:
        try:
            await wal.begin_epoch(master_epoch)
            return
        except WalFull as error:
            logger.warning("the WAL has no room for the new epoch, retrying", extra={"error": error})
            await clock.sleep(backoff.next_delay_s())
