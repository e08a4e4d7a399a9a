"""The tasks that read offsets of one topic, under one lease for many reads.

A job that follows a topic plans a read every few seconds. A lease for each (as a batch read has) would be hundreds.

Entry: `TopicReads`.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping
from typing import NamedTuple

from pyspark_tidelog.cluster import Cluster, Lease
from pyspark_tidelog.jobs.frame import ClusterAccess
from pyspark_tidelog.options import EARLIEST, LATEST
from pyspark_tidelog.plan import Task, plan_tasks
from pyspark_tidelog.reading import TaskContext, lost
from tidelog.runtime.errors import NotFound

logger = logging.getLogger(__name__)

LEASE_S = 600.0
LEASE_USE_S = 240.0
"""After so long another lease is taken, and the older one ends by itself: it would hold up deletions."""
Ranges = Mapping[int, tuple[int, int]]


class ReadPiece(NamedTuple):
    """What one task reads. Pickled to an executor."""

    task: Task
    context: TaskContext


class TopicEnds(NamedTuple):
    """A topic at one moment."""

    topic_id: str
    first: Mapping[int, int]
    """Partition → the first offset that exists."""
    end: Mapping[int, int]


class TopicReads:
    """Reads of one topic."""

    def __init__(self, access: ClusterAccess, topic: str, *, fails_on_loss: bool) -> None:
        loss = str(fails_on_loss).lower()
        self._options = access.read_options(subscribe=topic, includeHeaders="true", failOnDataLoss=loss)
        self._topic = topic
        self._lease: Lease | None = None
        self._taken_s = 0.0

    def look(self) -> TopicEnds:
        """Ask for the topic's id and offsets. Raises `NotFound` if it is not there, `Unavailable`."""
        cluster = Cluster(self._options)
        topic_id = cluster.topic_id(self._topic)
        places = cluster.partitions([self._topic])
        first, end = cluster.offsets(dict.fromkeys(places, EARLIEST)), cluster.offsets(dict.fromkeys(places, LATEST))
        return TopicEnds(
            topic_id,
            {partition: offset for (_, partition), offset in first.items()},
            {partition: offset for (_, partition), offset in end.items()},
        )

    def topic_id(self) -> str:
        """Ask for the topic's id. Raises `NotFound`, `Unavailable`."""
        return Cluster(self._options).topic_id(self._topic)

    def plan(self, ranges: Ranges) -> list[ReadPiece]:
        """Return tasks that read offsets `[start, end)` of partitions. Raises `DataLoss`, `NotFound`, `Unavailable`."""
        cluster = Cluster(self._options)
        lookups = cluster.lookups()
        asked = [(self._topic, partition, start, end) for partition, (start, end) in sorted(ranges.items())]
        if self._lease is not None and time.monotonic() - self._taken_s < LEASE_USE_S:
            try:
                lookups.renew_lease(self._lease)
            except NotFound:
                self._lease = None
        else:
            self._lease = None
        if self._lease is None:
            self._lease = lookups.take_lease(f"spark table on {platform.node()}", LEASE_S)
            self._taken_s = time.monotonic()
        cluster_id, planned = lookups.slices(asked, self._lease.version)
        for one in planned:
            start = ranges[one.partition][0]
            if one.start > start:
                told = lost(one.topic, one.partition, start, one.start)
                if self._options.fail_on_data_loss:
                    raise told
                logger.warning("%s", told.message)
        tasks = plan_tasks(planned, max_bytes=self._options.max_bytes)
        context = TaskContext(self._options, cluster_id, cluster.bucket(), lookups, self._lease)
        return [ReadPiece(task, context) for task in tasks]
