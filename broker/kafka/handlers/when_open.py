"""The log of a partition for a request that may wait a little while it opens here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.broker.partitions.openings import OPENING_WAIT_S, LeaderNotAvailable

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.stream.partition_log import PartitionLog


async def when_open(partitions: PartitionManager, topic: str, partition: int) -> PartitionLog:
    """Return the open log of a partition, after a wait while it is opening. Raises what `PartitionManager.get` does."""
    try:
        return partitions.get(topic, partition)
    except LeaderNotAvailable as error:
        if error.opening is None:
            raise
        opening = error.opening
    await opening.wait(OPENING_WAIT_S)
    return partitions.get(topic, partition)
