"""The data source `tidelog`: a topic as rows, with the columns of Spark's Kafka source.

    key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int
    and, with includeHeaders, headers array<struct<key string, value binary>>

The driver asks the brokers for one consistent cut of offsets, takes a lease, asks for the objects that hold them, and
cuts that into tasks (`pyspark_tidelog.plan`). Tasks read the objects in the bucket; brokers are asked only for what is
not uploaded yet, and, by a task that comes late, for where its offsets are now.

Docs: docs/spark.md, docs/design/0019-spark-source.md. Entry: `TidelogSource`.
"""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_tidelog.cluster import Cluster
from pyspark_tidelog.columns import spark_schema
from pyspark_tidelog.filters import Pruning, prune
from pyspark_tidelog.options import EARLIEST, LATEST, Bound, Partition, ReadOptions, read_options
from pyspark_tidelog.plan import PlannedRange, Task, plan_tasks
from pyspark_tidelog.reading import TaskContext, lost, read_task
from pyspark_tidelog.sink import TidelogBatchWriter, TidelogStreamWriter, batch_writer, stream_writer
from tidelog.runtime.errors import ConfigError, NotFound

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

logger = logging.getLogger(__name__)

NAME = "tidelog"
LEASE_S = 600.0
"""Time to live of a batch read's lease: until its first tasks run and renew it."""


class TidelogSource(DataSource):
    """See the module docstring."""

    @classmethod
    def name(cls) -> str:
        """See `DataSource.name`."""
        return NAME

    def schema(self) -> StructType:
        """See `DataSource.schema`."""
        return spark_schema(include_headers=read_options(self.options).include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """See `DataSource.reader`."""
        options = read_options(self.options)
        wanted = spark_schema(include_headers=options.include_headers)
        if schema != wanted:
            raise ConfigError(
                f"the schema {schema.simpleString()} is not the source's, {wanted.simpleString()}",
                hint="give no schema; select and cast columns afterwards",
            )
        return TidelogReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> TidelogBatchWriter:
        """See `DataSource.writer`."""
        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TidelogStreamWriter:  # noqa: N802  # Spark's name
        """See `DataSource.streamWriter`. Spark asks for `overwrite` in output mode complete."""
        return stream_writer(self.options, schema)


class TaskPartition(InputPartition):
    """One task, for Spark."""

    def __init__(self, task: Task, context: TaskContext) -> None:
        self.task = task
        self.context = context


class TidelogReader(DataSourceReader):
    """A batch read."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._pruning = Pruning()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """See `DataSourceReader.pushFilters`: filters on topic, partition, offset and timestamp leave out tasks."""
        self._pruning, left = prune(filters)
        return left

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the read: see `pyspark_tidelog.plan`."""
        options = self._options
        cluster = Cluster(options)
        lookups = cluster.lookups()
        places = [each for each in _places(cluster, options) if self._pruning.admits(*each)]
        ranges = self._ranges(cluster, places)
        if not ranges:
            return []
        lease = lookups.take_lease(f"spark on {platform.node()}", LEASE_S)
        cluster_id, planned = lookups.slices([(*place, *ranges[place]) for place in ranges], lease.version)
        checked = [self._checked(one, ranges[one.topic, one.partition]) for one in planned]
        tasks = plan_tasks(
            checked,
            max_bytes=options.max_bytes,
            max_records=options.max_records,
            min_tasks=options.min_partitions,
            reads_tail=options.reads_tail,
        )
        context = TaskContext(options, cluster_id, cluster.bucket(), lookups, lease)
        return [TaskPartition(task, context) for task in tasks]

    def _checked(self, one: PlannedRange, asked: tuple[int, int]) -> PlannedRange:
        if one.start > asked[0]:
            told = lost(one.topic, one.partition, asked[0], one.start)
            if self._options.fail_on_data_loss:
                raise told
            logger.warning("%s", told.message)
        return one

    def _ranges(self, cluster: Cluster, places: list[Partition]) -> dict[Partition, tuple[int, int]]:
        """Return the offsets to read of each partition, without those that have none."""
        options, pruning = self._options, self._pruning
        first, last = cluster.offsets(dict.fromkeys(places, EARLIEST)), cluster.offsets(dict.fromkeys(places, LATEST))
        starts = _resolve(cluster, options.starting, first, last, options, is_start=True)
        ends = _resolve(cluster, options.ending, first, last, options, is_start=False)
        since = {}
        if pruning.since_ms is not None:
            since = cluster.offsets(dict.fromkeys(places, max(0, pruning.since_ms)))
        found = {}
        for place in places:
            start, end = max(starts[place], pruning.start), min(ends[place], pruning.end)
            if place in since:
                start = max(start, since[place] if since[place] >= 0 else end)
            if start < end:
                found[place] = (start, end)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task. Of a read without any Spark makes one without a partition."""
        if not isinstance(partition, TaskPartition):
            return iter(())
        return read_task(partition.task, partition.context)


def _places(cluster: Cluster, options: ReadOptions) -> list[Partition]:
    """Return the partitions that are subscribed to. Raises `NotFound`."""
    if options.assigned:
        known = set(cluster.partitions({topic: None for topic, _ in options.assigned}))
        for topic, index in options.assigned:
            if (topic, index) not in known:
                raise NotFound(f"topic {topic} has no partition {index}", hint="see option assign")
        return list(options.assigned)
    if options.pattern:
        return cluster.partitions(name for name in cluster.topics if re.fullmatch(options.pattern, name))
    return cluster.partitions(options.topics)


def _resolve(
    cluster: Cluster,
    bound: Bound,
    first: Mapping[Partition, int],
    last: Mapping[Partition, int],
    options: ReadOptions,
    *,
    is_start: bool,
) -> dict[Partition, int]:
    """Return the offset of each partition at which reading begins or ends."""
    if bound.offset is not None:
        return dict(first if bound.offset == EARLIEST else last)
    name = "starting" if is_start else "ending"
    if bound.offsets:
        _all_named(first, bound.offsets, f"{name}Offsets")
        told = {EARLIEST: first, LATEST: last}
        return {
            place: told[at][place] if at in told else _known(place, at, last[place], name)
            for place, at in bound.offsets.items()
            if place in first
        }
    times = dict.fromkeys(first, bound.timestamp_ms) if bound.timestamp_ms is not None else dict(bound.timestamps)
    if bound.timestamps:
        _all_named(first, bound.timestamps, f"{name}OffsetsByTimestamp")
    found = cluster.offsets({place: at for place, at in times.items() if place in first and at is not None})
    for place, offset in found.items():
        if offset >= 0:
            continue
        if is_start and not options.latest_after_timestamps:
            raise ConfigError(
                f"{place[0]}-{place[1]} has no record with the starting timestamp or a later one",
                hint="startingOffsetsByTimestampStrategy = latest begins at the end there",
            )
        found[place] = last[place]
    return found


def _known(place: Partition, offset: int, end: int, name: str) -> int:
    if offset > end:
        raise ConfigError(f"option {name}Offsets: {place[0]}-{place[1]} ends at offset {end}, before {offset}")
    return offset


def _all_named(places: Mapping[Partition, int], named: Mapping[Partition, int], option: str) -> None:
    missing = [f"{topic}-{index}" for topic, index in places if (topic, index) not in named]
    if missing:
        raise ConfigError(f"option {option} names no offset for {', '.join(missing[:5])}", hint="name every partition")
