"""How much log compaction a simulation has seen: a run without a round shows nothing about it.

Entry: `CleaningRounds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tidelog.broker.partitions.log_cleaner import LogCleaner
from tidelog.stream.partition_log import PartitionLog

if TYPE_CHECKING:
    from tidelog.simulation.world.cluster import SimCluster


@dataclass(slots=True)
class CleaningRounds:
    """Counts over the lives of brokers."""

    whole: int = 0
    given_up: int = 0
    """Ended by a move, a fault, or objects that others have replaced."""
    cut_off: int = 0
    """Their process has ended."""
    removed_bytes: int = 0

    def add(self, cleaner: LogCleaner) -> None:
        """Add what the cleaner of a broker has done that ends now."""
        self.whole += cleaner.stats.rounds
        self.given_up += cleaner.stats.given_up
        self.cut_off += cleaner.running is not None
        self.removed_bytes += cleaner.stats.removed_bytes

    def __str__(self) -> str:
        counts = f"{self.whole} rounds of log compaction, {self.given_up} given up, {self.cut_off} cut off"
        return f"{counts}, {self.removed_bytes} bytes removed"


class _Compacted(NamedTuple):
    """A compacted log that is open at its leader, with what compacts it, and the leader's wall clock."""

    log: PartitionLog
    cleaner: LogCleaner
    now_ms: int


def compacted_logs(cluster: SimCluster) -> Iterator[_Compacted]:
    """Yield the compacted logs that are open at their leaders, but for internal ones."""
    active = cluster.active
    for node in cluster.brokers:
        if node.broker is None or node.log_cleaner is None or not node.ready or active is None:
            continue
        for log in node.broker.parts.partitions.manager.all():
            topic = active.image.topic(log.topic)
            if topic is None or topic.internal or log.closed or not log.config.compacts:
                continue
            if log.cleaning.is_allowed:
                yield _Compacted(log, node.log_cleaner, node.clock.time_ms())


def cleaned_up_to(cluster: SimCluster) -> dict[tuple[str, int], int]:
    """Return where the last rounds of compacted partitions ended, by topic and partition."""
    return {(log.topic, log.partition): log.cleaning.last().first_dirty for log, _, _ in compacted_logs(cluster)}


def left_out(cluster: SimCluster) -> set[tuple[str, int]]:
    """Return the partitions in which something is left out, since a snapshot or a branch holds it."""
    return {(log.topic, log.partition) for log, _, _ in compacted_logs(cluster) if log.cleaning.left}


def rounds_missing(cluster: SimCluster, since: Mapping[tuple[str, int], int]) -> list[str]:
    """Return the partitions that a round is due for, and that are compacted no further than they were then."""
    return [
        f"{log.topic}-{log.partition} is not compacted from offset {first_dirty} on"
        for log, cleaner, now_ms in compacted_logs(cluster)
        if (first_dirty := log.cleaning.last().first_dirty) <= since.get((log.topic, log.partition), first_dirty)
        and log.cleaning.plan(now_ms, log.config, is_held=cleaner.is_left(log)).is_due
    ]
