"""The tasks that read offsets of one topic, under one lease for many reads.

A job that follows a topic plans a read every few seconds. A lease for each (as a batch read has) would be hundreds.

Entry: `TopicReads`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import NamedTuple

from pyspark_tidelog.cluster import Cluster, retried
from pyspark_tidelog.jobs.frame import ClusterAccess
from pyspark_tidelog.options import EARLIEST
from pyspark_tidelog.planning import TaskPartition, find_ranges, tasks_of, undeleted
from pyspark_tidelog.stream import MovingLease
from tidelog.runtime.errors import NotFound

LEASE_S = 600.0
Ranges = Mapping[int, tuple[int, int]]


class TopicEnds(NamedTuple):
    """A topic at one moment."""

    topic_id: str
    first: Mapping[int, int]
    """Partition → the first offset that exists."""
    end: Mapping[int, int]
    """Up to where it is read: with `read_committed` the last stable offset."""
    log_end: Mapping[int, int]
    epochs: Mapping[int, int]
    """Partition → its leader epoch, where that is told."""


class TopicReads:
    """Reads of one topic."""

    def __init__(self, access: ClusterAccess, topic: str, *, fails_on_loss: bool) -> None:
        loss = str(fails_on_loss).lower()
        self._options = access.read_options(subscribe=topic, includeHeaders="true", failOnDataLoss=loss)
        self._topic = topic
        self._lease = MovingLease(f"spark table on {platform.node()}", LEASE_S)

    def look(self) -> TopicEnds:
        """Ask for the topic's id and offsets. Raises `NotFound` if it is not there, `Unavailable`."""
        return retried(self._look)

    def _look(self) -> TopicEnds:
        cluster = Cluster(self._options)
        topic_id = self._id(cluster)
        places = cluster.partitions([self._topic])
        first, told = cluster.offsets(dict.fromkeys(places, EARLIEST)), cluster.ends(places)
        end = {place: each.offset for place, each in told.items()}
        return TopicEnds(
            topic_id,
            {partition: offset for (_, partition), offset in first.items()},
            {partition: offset for (_, partition), offset in end.items()},
            {partition: offset for (_, partition), offset in cluster.log_ends(end).items()},
            {partition: each.epoch for (_, partition), each in told.items() if each.epoch >= 0},
        )

    def epoch_ends(self, epochs: Mapping[int, int]) -> dict[int, int]:
        """Return where leader epochs of partitions end, as `Cluster.epoch_ends`. Raises `Unavailable`."""
        if not epochs:
            return {}
        asked = {(self._topic, partition): epoch for partition, epoch in epochs.items()}
        found = retried(lambda: Cluster(self._options).epoch_ends(asked))
        return {partition: end for (_, partition), end in found.items()}

    def topic_id(self) -> str:
        """Ask for the topic's id. Raises `NotFound`, `Unavailable`."""
        return retried(lambda: self._id(Cluster(self._options)))

    def _id(self, cluster: Cluster) -> str:
        found = cluster.topic_ids([self._topic])
        if self._topic not in found:
            raise NotFound(f"there is no topic {self._topic!r} at {self._options.bootstrap}")
        return found[self._topic]

    def plan(self, ranges: Ranges) -> list[TaskPartition]:
        """Return tasks that read offsets `[start, end)` of partitions. Raises `DataLoss`, `NotFound`, `Unavailable`."""
        return retried(lambda: self._plan(ranges))

    def _plan(self, ranges: Ranges) -> list[TaskPartition]:
        cluster = Cluster(self._options)
        lookups = cluster.lookups()
        wanted = {(self._topic, partition): each for partition, each in sorted(ranges.items())}
        asked = undeleted(cluster, wanted, self._options)
        if not asked:
            return []
        lease = self._lease.moved_on(lookups)
        found = find_ranges(cluster, lookups, [(*place, *each) for place, each in asked.items()], lease)
        self._lease.saw(found.version)
        return tasks_of(found, asked, cluster, lookups, lease)

    def close(self) -> None:
        """End the lease."""
        self._lease.end()
