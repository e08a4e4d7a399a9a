"""The compacted topic of the simulator (`tidelog.simulation.actors.compacted`) against real processes.

Rounds of log compaction run all the time, while partitions move and nodes are killed. Entry: `TableThread`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidelog.chaos.actors import SETTLE_S, ActorThread
from tidelog.chaos.serve_cluster import tidelog_json
from tidelog.simulation.actors.compacted import TABLE, CompactedTopic, promises
from tidelog.simulation.actors.workload import Topic, Workload

if TYPE_CHECKING:
    from tidelog.chaos.clients import ClientJournal

TABLE_PARTITIONS = 4
KEYS = 50
"""That are overwritten."""
WRITERS = 2
PACE_S = (0.03, 0.15)
"""See `tidelog.simulation.actors.compacted.PACE_S`."""
TOMBSTONES_MS = 10_000
CONFIGS = {
    "segment.bytes": "4000",
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(TOMBSTONES_MS),
}
"""Beside the policy."""
CLEANER: Mapping[str, Any] = {"cleaner_interval_ms": 300}
"""The brokers' settings in section `log`."""
FIRST_TABLE_PROCESS = 1_000_000


class TableThread(ActorThread):
    """Writers, readers and the auditor."""

    def __init__(self, journal: ClientJournal, seed: int) -> None:
        super().__init__("compacted topic", journal, seed, FIRST_TABLE_PROCESS)
        self.table: CompactedTopic | None = None

    def places(self) -> list[str]:
        """See `ActorThread.places`."""
        return [f"{TABLE}:{index}" for index in range(TABLE_PARTITIONS)]

    def begin(self, workload: Workload, rng: random.Random) -> None:
        """See `ActorThread.begin`."""
        deletes = rng.random() < 0.5  # by DeleteRecords: nothing is so old that retention would
        configs = {**CONFIGS, "cleanup.policy": "compact,delete" if deletes else "compact"}
        topic = Topic(TABLE, TABLE_PARTITIONS, deletes, configs, promises(0, TOMBSTONES_MS))
        self.table = CompactedTopic(workload, topic, KEYS, WRITERS, transactions=True, pace_s=PACE_S)
        self.table.start()

    async def audit(self) -> None:
        """See `ActorThread.audit`."""
        assert self.table is not None
        bootstrap = self._journal.bootstrap.split(",")[0]
        found = await asyncio.to_thread(tidelog_json, bootstrap, "topic", "describe", TABLE)
        rows = found[0]["partitions"] if found else []
        self.table.note_cleaned({row["partition"]: row["first_dirty_offset"] or 0 for row in rows})
        await self.table.audit(SETTLE_S)
