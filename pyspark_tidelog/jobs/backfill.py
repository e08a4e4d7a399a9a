"""The job `backfill`: the history of a topic of any Kafka cluster, into a topic of Tidelog.

Key, value, headers and timestamp are preserved; a partition goes into that of the same number, in its order, one task
for each, which reads what is committed from the other cluster's brokers (`pyspark_tidelog.jobs.kafka_range`) and writes
it by one producer (`pyspark_tidelog.jobs.ordered`).

Offsets are preserved, too, so that consumers go on with the offsets that they have committed there: the target begins
empty, and an offset without a record at the source is refused, or filled with `--fill-holes`; what the source's
retention has removed is filled likewise, and deleted again. With `--renumber` offsets are given up.

Run again, it goes on at the target's end, after the last record there was compared with the source's: after a kill, or
to fetch what the source got meanwhile. A target with anything else is refused.

Entry: `run`, `plan`, `BackfillOptions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark_tidelog.jobs.frame import ClusterAccess, spark_job
from pyspark_tidelog.jobs.kafka_range import read_range
from pyspark_tidelog.jobs.ordered import CopiedPartition, PartitionCopy, copy_partition
from pyspark_tidelog.jobs.topics import TopicAdmin, client_settings, copy_settings, prepare_copy
from tidelog.runtime.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class BackfillOptions:
    """Where to copy from, and where to."""

    cluster: ClusterAccess
    """Of the target."""
    source: Mapping[str, str] = field(repr=False)
    """librdkafka's settings for the other cluster, `bootstrap.servers` among them."""
    topic: str
    """At the source."""
    to_topic: str = ""
    """Empty: the same name."""
    keeps_offsets: bool = True
    fills_holes: bool = False

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for options that exclude each other."""
        if self.fills_holes and not self.keeps_offsets:
            raise InvalidInput("holes are filled only where offsets are preserved", hint="give one of the two")


@dataclass(frozen=True)
class BackfillRange:
    """A partition: what the source has, and where the target is."""

    partition: int
    start: int
    end: int
    """Of the source: offsets `[start, end)`."""
    target_end: int
    """0 for a topic that is not there."""


@dataclass(frozen=True)
class BackfillPlan:
    """What a backfill would do."""

    topic: str
    target: str
    creates_target: bool
    keeps_offsets: bool
    ranges: tuple[BackfillRange, ...]
    tasks: int


@dataclass(frozen=True)
class BackfillResult:
    """What a backfill did."""

    topic: str
    target: str
    keeps_offsets: bool
    ranges: tuple[BackfillRange, ...]
    """`target_end` as it is now."""
    records: int
    """That this run wrote."""
    found: int
    """Offsets that an earlier run had written."""
    filled: int
    """Offsets that this run gave a record without key and value."""
    restamped: int
    """Records with timestamp 0, which a client cannot write: they got the time of the backfill."""


def plan(options: BackfillOptions) -> BackfillPlan:
    """Return what would be done. Raises `NotFound`, `InvalidInput`, `Unavailable`, `ConfigError`."""
    target = _target(options)
    known = TopicAdmin(client_settings(options.cluster)).partitions(target)
    ranges = _ranges(options, known or 0)
    tasks = sum(one.start < one.end or one.target_end < one.end for one in ranges)
    return BackfillPlan(options.topic, target, known is None, options.keeps_offsets, ranges, tasks)


def run(spark: SparkSession, options: BackfillOptions) -> BackfillResult:
    """Backfill. Raises `InvalidInput` for a hole or a target that has something else, `DataLoss`, `Unavailable`."""
    target = _target(options)
    with spark_job(spark, "backfill", f"backfill of {options.topic} into {target}") as job:
        source, topics = TopicAdmin(options.source), TopicAdmin(client_settings(options.cluster))
        count = source.existing(options.topic)
        prepare_copy(topics, target, (count, count), source.configs(options.topic), options.topic)
        ranges = _ranges(options, count)
        settings = copy_settings(options.cluster, target)
        copies = [_copy_of(options, settings, one) for one in ranges if one.end or one.target_end]
        with job.stage(f"backfill: copy {len(copies)} partitions of {options.topic} into {target}"):
            done = {each.partition: each for each in _copy(spark, copies, options.source)}
    ends = {partition: each.end for partition, each in done.items()}
    return BackfillResult(
        options.topic,
        target,
        options.keeps_offsets,
        tuple(BackfillRange(one.partition, one.start, one.end, ends.get(one.partition, 0)) for one in ranges),
        sum(each.copied for each in done.values()),
        sum(each.found for each in done.values()),
        sum(each.filled for each in done.values()),
        sum(each.restamped for each in done.values()),
    )


def _target(options: BackfillOptions) -> str:
    return options.to_topic or options.topic


def _ranges(options: BackfillOptions, known: int) -> tuple[BackfillRange, ...]:
    """Return the committed offsets of the source, and the target's ends. Raises as `plan`."""
    source = TopicAdmin(options.source)
    count = source.existing(options.topic)
    bounds = source.bounds(options.topic, range(count), committed=True)
    topics, target = TopicAdmin(client_settings(options.cluster)), _target(options)
    ends = topics.bounds(target, range(min(known, count)), committed=False)
    return tuple(BackfillRange(at, *bounds[at], ends[at][1] if at in ends else 0) for at in range(count))


def _copy_of(options: BackfillOptions, settings: Mapping[str, str], one: BackfillRange) -> PartitionCopy:
    return PartitionCopy(
        source=options.topic,
        topic=_target(options),
        partition=one.partition,
        start=one.start,
        end=one.end,
        keeps_offsets=options.keeps_offsets,
        fills_holes=options.fills_holes,
        kafka=settings,
    )


def _copy(spark: SparkSession, copies: Sequence[PartitionCopy], source: Mapping[str, str]) -> Sequence[CopiedPartition]:
    if not copies:
        return []

    def copy_one(copy: PartitionCopy) -> CopiedPartition:
        return copy_partition(copy, lambda start: read_range(source, copy.source, copy.partition, start, copy.end))

    found: list[CopiedPartition] = spark.sparkContext.parallelize(copies, len(copies)).map(copy_one).collect()
    return found
