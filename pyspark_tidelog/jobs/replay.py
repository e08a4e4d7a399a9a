"""The job `replay`: offsets or a range of time of a topic into another topic, or into Parquet files.

Into a topic, key, value, headers and timestamp are preserved:

- *by partition* (the default): a partition goes into that of the same number, in its order, one task for each
  (`pyspark_tidelog.jobs.ordered`). Run again, with the same beginning, it goes on where it was: the records that the
  target has are counted, and its first and last one compared with the source's. A target with anything else is
  refused.
- *by key*: the key chooses the partition, of which the target may have any number. One task for each partition of the
  source writes by the sink (`pyspark_tidelog.sink`), so records of a key stay in their order. At least once, if Spark
  runs a task again; the target has to be empty, for after a run that ended midway nobody can say what is there.

Into Parquet, Spark writes the columns of the data source with as many tasks as it reads with, in directories by topic,
partition and day (UTC). Run again, it replaces all that it made, and nothing else
(`pyspark_tidelog.jobs.parquet_target`).

Entry: `run`, `plan`, `ReplayOptions`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark_tidelog.cluster import LeaseKeeper
from pyspark_tidelog.columns import column_names, spark_schema
from pyspark_tidelog.jobs.frame import ClusterAccess, RunningJob, spark_job
from pyspark_tidelog.jobs.ordered import CopiedPartition, PartitionCopy, copy_partition
from pyspark_tidelog.jobs.parquet_target import OwnedDirectory
from pyspark_tidelog.jobs.topics import TopicAdmin, client_settings, copy_settings, prepare_copy, sink_options
from pyspark_tidelog.options import read_options
from pyspark_tidelog.reading import read_task
from pyspark_tidelog.sink import write_rows
from pyspark_tidelog.sink_options import write_options
from pyspark_tidelog.source import TidelogReader
from tidelog.runtime.errors import AlreadyExists, ConfigError, InvalidInput, Unavailable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

COLUMNS = ["topic", "partition", "day"]
"""Directories of the Parquet files."""
_DAY = "date_from_unix_date(cast(floor(unix_millis(timestamp) / 86400000) as int)) as day"
"""In UTC, whatever the session's time zone is."""


@dataclass(frozen=True)
class ReplayOptions:
    """What to replay, and where to. Exactly one of `to_topic` and `to_parquet` is given."""

    cluster: ClusterAccess
    topic: str
    to_topic: str = ""
    to_parquet: str = ""
    by_key: bool = False
    bounds: Mapping[str, str] = field(default_factory=dict)
    """Options of the data source: `startingTimestamp`, `endingOffsets`, …"""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a target that makes no sense."""
        _check(self)


@dataclass(frozen=True)
class ReplayRange:
    """What of a partition is replayed: offsets `[start, end)`."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class ReplayPlan:
    """What a replay would do."""

    topic: str
    target: str
    creates_target: bool
    ranges: tuple[ReplayRange, ...]
    bytes: int
    """Of the objects that are to be read, as a whole: less of each may be needed."""
    tasks: int


@dataclass(frozen=True)
class ReplayResult:
    """What a replay did."""

    topic: str
    target: str
    ranges: tuple[ReplayRange, ...]
    records: int
    """That this run wrote."""
    found: int
    """That an earlier run had written."""
    restamped: int = 0
    """Records with timestamp 0, which a client cannot write: they got the time of the replay."""


def plan(options: ReplayOptions) -> ReplayPlan:
    """Return what would be done. Raises `ConfigError`, `NotFound`, `Unavailable`."""
    with _planned(options) as parts:
        ranges = _ranges(parts)
        sizes = {each.object_id: each.size for part in parts for each in part.task.slices}
    topics = TopicAdmin(client_settings(options.cluster))
    is_new = bool(options.to_topic) and topics.partitions(options.to_topic) is None
    tasks = len(ranges) if options.to_topic else len(parts)
    return ReplayPlan(options.topic, _target(options), is_new, ranges, sum(sizes.values()), tasks)


def run(spark: SparkSession, options: ReplayOptions) -> ReplayResult:
    """Replay. Raises `InvalidInput` for a target that has something else, `DataLoss`, `Unavailable`."""
    with spark_job(spark, "replay", f"replay of {options.topic} into {_target(options)}") as job:
        if options.to_parquet:
            return _to_parquet(spark, job, options)
        return _to_topic(spark, job, options)


def _target(options: ReplayOptions) -> str:
    return options.to_topic or options.to_parquet


def _check(options: ReplayOptions) -> None:
    if bool(options.to_topic) == bool(options.to_parquet):
        raise ConfigError("exactly one target is needed: a topic, or a path for Parquet files")
    if options.by_key and not options.to_topic:
        raise ConfigError("keys choose partitions of a topic, not of Parquet files", hint="leave out --by-key")
    if options.to_topic == options.topic:
        raise ConfigError(f"topic {options.topic} cannot be replayed into itself", hint="name another target")


def _source_options(options: ReplayOptions) -> dict[str, str]:
    found: dict[str, object] = {"subscribe": options.topic, "includeHeaders": "true", **options.bounds}
    if "startingTimestamp" in options.bounds:
        found["startingOffsetsByTimestampStrategy"] = "latest"
    return options.cluster.source_options(**found)


@contextmanager
def _planned(options: ReplayOptions) -> Iterator[Sequence[Any]]:
    """Return the tasks of the read, while their lease is held."""
    parts: Sequence[Any] = TidelogReader(read_options(_source_options(options))).partitions()
    if not parts:
        yield parts
        return
    lookups, lease = parts[0].context.lookups, parts[0].context.lease
    with LeaseKeeper(lookups, lease):
        yield parts
    with suppress(Unavailable):  # it ends by itself
        lookups.end_lease(lease)


def _by_partition(parts: Iterable[Any]) -> dict[int, list[Any]]:
    """Return the tasks of each partition in the order of their offsets."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    for part in sorted(parts, key=lambda each: (each.task.partition, each.task.start)):
        found[part.task.partition].append(part)
    return dict(found)


def _ranges(parts: Iterable[Any]) -> tuple[ReplayRange, ...]:
    grouped = _by_partition(parts)
    return tuple(ReplayRange(index, mine[0].task.start, mine[-1].task.end) for index, mine in grouped.items())


def rows_from(parts: Iterable[Any], start: int) -> Iterator[pa.RecordBatch]:
    """Read the tasks of a partition one after the other, from an offset on."""
    for part in parts:
        if part.task.end > start:
            yield from read_task(replace(part.task, start=max(part.task.start, start)), part.context)


def _to_topic(spark: SparkSession, job: RunningJob, options: ReplayOptions) -> ReplayResult:
    topics = TopicAdmin(client_settings(options.cluster))
    count = topics.existing(options.topic)
    wanted = 1 if options.by_key else count
    prepare_copy(topics, options.to_topic, (count, wanted), topics.configs(options.topic), options.topic)
    if options.by_key:
        return _to_topic_by_key(spark, job, options, topics)
    settings = copy_settings(options.cluster, options.to_topic)
    with _planned(options) as parts:
        grouped = _by_partition(parts)
        idle = [index for index in range(count) if index not in grouped]
        for index, (_, end) in topics.bounds(options.to_topic, idle, committed=False).items():
            if end:
                raise InvalidInput(
                    f"{options.to_topic}-{index} has records, and nothing of {options.topic}-{index} is replayed",
                    hint="name a target that is empty, or has what an earlier run with the same arguments left",
                )
        copies = [
            (
                PartitionCopy(
                    source=options.topic,
                    topic=options.to_topic,
                    partition=one.partition,
                    start=one.start,
                    end=one.end,
                    keeps_offsets=False,
                    kafka=settings,
                ),
                grouped[one.partition],
            )
            for one in _ranges(parts)
        ]
        with job.stage(f"replay: copy {len(copies)} partitions of {options.topic} into {options.to_topic}"):
            done = _copy(spark, copies)
    return ReplayResult(
        options.topic,
        options.to_topic,
        _ranges(parts),
        sum(each.copied for each in done),
        sum(each.found for each in done),
        sum(each.restamped for each in done),
    )


def _copy(spark: SparkSession, copies: Sequence[tuple[PartitionCopy, list[Any]]]) -> list[CopiedPartition]:
    if not copies:
        return []

    def copy_one(work: tuple[PartitionCopy, list[Any]]) -> CopiedPartition:
        return copy_partition(work[0], lambda start: rows_from(work[1], start))

    return spark.sparkContext.parallelize(copies, len(copies)).map(copy_one).collect()


def zero_timestamps(batch: pa.RecordBatch) -> int:
    """Return how many rows have the timestamp 0, which librdkafka replaces by the time of the write."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.sum(pc.equal(batch["timestamp"].cast(pa.int64()), 0)).as_py() or 0


def _to_topic_by_key(spark: SparkSession, job: RunningJob, options: ReplayOptions, topics: TopicAdmin) -> ReplayResult:
    target = options.to_topic
    bounds = topics.bounds(target, range(topics.existing(target)), committed=False)
    there = sum(end for _, end in bounds.values())
    if there:
        raise AlreadyExists(
            f"topic {target} has {there} records, which a replay by key cannot tell from its own",
            hint="delete the topic, and begin anew",
        )
    writes = write_options(sink_options(options.cluster, target, keeps_timestamps=True))
    columns = ["key", "value", "headers", "timestamp"]

    def write(parts: list[Any]) -> tuple[int, int]:
        restamped = 0

        def batches() -> Iterator[pa.RecordBatch]:
            nonlocal restamped
            for batch in rows_from(parts, 0):
                restamped += zero_timestamps(batch)
                yield batch.select(columns)

        return write_rows(batches(), writes).rows, restamped

    with _planned(options) as parts, job.stage(f"replay: write {options.topic} to {target} by key"):
        work = list(_by_partition(parts).values())
        done = spark.sparkContext.parallelize(work, len(work)).map(write).collect() if work else []
    records, restamped = (sum(each[at] for each in done) for at in (0, 1))
    return ReplayResult(options.topic, target, _ranges(parts), records, 0, restamped)


def _to_parquet(spark: SparkSession, job: RunningJob, options: ReplayOptions) -> ReplayResult:
    directory = OwnedDirectory(spark, options.to_parquet, f"replay of {options.topic}")
    schema = spark_schema(column_names(include_headers=True))
    with _planned(options) as parts:
        ranges = _ranges(parts)
    if ranges:
        frame = spark.read.format("tidelog").options(**_exactly(options, ranges)).load()
    else:
        frame = spark.createDataFrame([], schema)
    with job.stage(f"replay: write {options.topic} to {options.to_parquet}"):
        directory.replace(frame.selectExpr("*", _DAY), COLUMNS)
    with job.stage(f"replay: count the records in {options.to_parquet}"):
        records = spark.read.schema(schema).parquet(options.to_parquet).count()
    return ReplayResult(options.topic, options.to_parquet, ranges, records, 0)


def _exactly(options: ReplayOptions, ranges: Sequence[ReplayRange]) -> dict[str, str]:
    """Return options of the data source that read these ranges."""
    starts = {str(one.partition): one.start for one in ranges}
    ends = {str(one.partition): one.end for one in ranges}
    return options.cluster.source_options(
        assign=json.dumps({options.topic: [one.partition for one in ranges]}),
        startingOffsets=json.dumps({options.topic: starts}),
        endingOffsets=json.dumps({options.topic: ends}),
        includeHeaders="true",
    )
