"""The driver's part of a read: which partitions and offsets it has, and the tasks that read them.

Entry: `places`, `bounds`, `tasks_of`, `tell_lost`, `TaskPartition`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from pyspark.sql.datasource import InputPartition

from pyspark_tidelog.cluster import Cluster, Lease, Lookups
from pyspark_tidelog.manifests import AskedRange, FoundRanges
from pyspark_tidelog.manifests import find_ranges as _find_ranges
from pyspark_tidelog.options import EARLIEST, LATEST, Partition, ReadOptions
from pyspark_tidelog.plan import PlannedRange, Task, plan_tasks
from pyspark_tidelog.reading import TaskContext, lost
from tidelog.runtime.errors import ConfigError, NotFound

logger = logging.getLogger(__name__)

Ends = Mapping[Partition, int]
"""An offset of each partition."""


class TaskPartition(InputPartition):
    """One task, for Spark."""

    def __init__(self, task: Task, context: TaskContext) -> None:
        self.task = task
        self.context = context


def places(cluster: Cluster, options: ReadOptions) -> list[Partition]:
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


def bounds(cluster: Cluster, first: Ends, last: Ends, *, is_start: bool) -> dict[Partition, int]:
    """Return the offset of each partition at which reading begins or ends, by the options. Raises `ConfigError`."""
    options = cluster.options
    bound = options.starting if is_start else options.ending
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


def _all_named(places: Ends, named: Ends, option: str) -> None:
    missing = [f"{topic}-{index}" for topic, index in places if (topic, index) not in named]
    if missing:
        raise ConfigError(f"option {option} names no offset for {', '.join(missing[:5])}", hint="name every partition")


def find_ranges(cluster: Cluster, lookups: Lookups, asked: Sequence[AskedRange], lease: Lease) -> FoundRanges:
    """Find the objects of ranges, each of another partition. Raises `NotFound`, `CorruptData`, `Unavailable`."""
    return _find_ranges(lookups, cluster.bucket(), asked, lease, most=cluster.options.max_slices)


def tasks_of(
    found: FoundRanges, asked: Mapping[Partition, tuple[int, int]], cluster: Cluster, lookups: Lookups, lease: Lease
) -> list[TaskPartition]:
    """Return the tasks that read what was looked up for the offsets asked for.

    Raises `DataLoss` where the first offsets are gone, unless the options say that they may be.
    """
    options = cluster.options
    checked = [_checked(one, asked[one.topic, one.partition][0], options) for one in found.ranges]
    tasks = plan_tasks(
        checked,
        max_bytes=options.max_bytes,
        max_records=options.max_records,
        min_tasks=options.min_partitions,
        reads_tail=options.reads_tail,
    )
    context = TaskContext(options, found.cluster_id, cluster.bucket(), lookups, lease)
    return [TaskPartition(task, context) for task in found.place(tasks)]


def _checked(one: PlannedRange, start: int, options: ReadOptions) -> PlannedRange:
    if one.start > start:
        tell_lost((one.topic, one.partition), start, one.start, options)
    return one


def undeleted(
    cluster: Cluster, ranges: Mapping[Partition, tuple[int, int]], options: ReadOptions
) -> dict[Partition, tuple[int, int]]:
    """Return the offsets `[start, end)` that were not deleted; objects have deleted ones for a while.

    Raises `DataLoss`, unless the options say that they may be, and `Unavailable`.
    """
    first = cluster.offsets(dict.fromkeys(ranges, EARLIEST))
    found = {}
    for place, (start, end) in ranges.items():
        if start < first[place]:
            tell_lost(place, start, min(first[place], end), options)
        if max(start, first[place]) < end:
            found[place] = (max(start, first[place]), end)
    return found


def tell_lost(place: Partition, start: int, first: int, options: ReadOptions) -> None:
    """Say that offsets `[start, first)` are gone. Raises `DataLoss`, unless the options say that they may be."""
    told = lost(*place, start, first)
    if options.fail_on_data_loss:
        raise told
    logger.warning("%s", told.message)
