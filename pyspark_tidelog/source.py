"""The data source `tidelog`: a topic as rows, with the columns of Spark's Kafka source.

    key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int
    and, with includeHeaders, headers array<struct<key string, value binary>>

or those of them that the read's schema names.

The driver asks the brokers for one consistent cut of offsets, takes a lease, asks for the objects that hold them, and
cuts that into tasks (`pyspark_tidelog.plan`). Tasks read the objects in the bucket; brokers are asked only for what is
not uploaded yet, and, by a task that comes late, for where its offsets are now.

Docs: docs/spark.md, docs/design/0019-spark-source.md. Entry: `TidelogSource`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_tidelog.cluster import Cluster, retried
from pyspark_tidelog.columns import columns_of, spark_schema
from pyspark_tidelog.exactly_once import ExactlyOnceWriter, stream_writer
from pyspark_tidelog.filters import Pruning, prune
from pyspark_tidelog.options import (
    EARLIEST,
    LATEST,
    Partition,
    ReadOptions,
    default_columns,
    read_options,
    stream_options,
)
from pyspark_tidelog.planning import TaskPartition, bounds, find_ranges, places, tasks_of, tell_lost
from pyspark_tidelog.reading import read_task
from pyspark_tidelog.sink import TidelogBatchWriter, TidelogStreamWriter, batch_writer
from pyspark_tidelog.stream import TidelogStreamReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

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
        return spark_schema(default_columns(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """See `DataSource.reader`."""
        return TidelogReader(replace(read_options(self.options), columns=columns_of(schema)))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """See `DataSource.streamReader`."""
        return TidelogStreamReader(replace(stream_options(self.options), columns=columns_of(schema)))

    def writer(self, schema: StructType, overwrite: bool) -> TidelogBatchWriter:
        """See `DataSource.writer`."""
        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802  # Spark's name
        self, schema: StructType, overwrite: bool
    ) -> TidelogStreamWriter | ExactlyOnceWriter:
        """See `DataSource.streamWriter`. Spark asks for `overwrite` in output mode complete."""
        return stream_writer(self.options, schema)


class _Push:
    """`TidelogReader.pushFilters`, as Spark calls it.

    While `spark.sql.python.filterPushdown.enabled` is false, as it is by default, Spark refuses a reader whose class
    has that method (DATA_SOURCE_PUSHDOWN_DISABLED). It looks at `__func__`. What is not pushed down Spark filters
    itself.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)  # as it is, and not bound to this object

    def __init__(self, reader: TidelogReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._reader.push(filters)


class TidelogReader(DataSourceReader):
    """A batch read."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._pruning = Pruning()
        self.pushFilters = _Push(self)  # type: ignore[method-assign]

    def push(self, filters: list[Filter]) -> Iterable[Filter]:
        """See `DataSourceReader.pushFilters`: filters on topic, partition, offset and timestamp leave out tasks."""
        self._pruning, left = prune(filters)
        return left

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the read: see `pyspark_tidelog.plan`."""
        return retried(self._plan)

    def _plan(self) -> Sequence[InputPartition]:
        cluster = Cluster(self._options)
        lookups = cluster.lookups()
        wanted = [each for each in places(cluster, self._options) if self._pruning.admits(*each)]
        ranges = self._ranges(cluster, wanted)
        if not ranges:
            return []
        lease = lookups.take_lease(f"spark on {platform.node()}", LEASE_S)
        found = find_ranges(cluster, lookups, [(*place, *ranges[place]) for place in ranges], lease)
        return tasks_of(found, ranges, cluster, lookups, lease)

    def _ranges(self, cluster: Cluster, wanted: list[Partition]) -> dict[Partition, tuple[int, int]]:
        """Return the offsets to read of each partition, without those that have none. Raises `DataLoss`."""
        pruning = self._pruning
        first, last = cluster.offsets(dict.fromkeys(wanted, EARLIEST)), cluster.offsets(dict.fromkeys(wanted, LATEST))
        starts = bounds(cluster, first, last, is_start=True)
        ends = bounds(cluster, first, last, is_start=False)
        since = {}
        if pruning.since_ms is not None:
            since = cluster.offsets(dict.fromkeys(wanted, max(0, pruning.since_ms)))
        found = {}
        for place in wanted:
            start, end = max(starts[place], pruning.start), min(ends[place], pruning.end)
            if place in since:
                start = max(start, since[place] if since[place] >= 0 else end)
            if start < end and start < first[place]:  # objects have offsets for a while after they were deleted
                tell_lost(place, start, min(first[place], end), self._options)
                start = first[place]
            if start < end:
                found[place] = (start, end)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task. Of a read without any Spark makes one without a partition."""
        if not isinstance(partition, TaskPartition):
            return iter(())
        return read_task(partition.task, partition.context)
