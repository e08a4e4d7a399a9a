"""Plans with very many slices: a broker writes them to the bucket, and tasks name their part (docs/design/0021).

The driver reads a manifest once, to cut the plan into tasks; a task reads the slices of its own offsets by two small
requests. A manifest is deleted when the lease that it was written for has ended: then a task asks a broker, as one that
misses an object does.

Invariant: the parts of a task name exactly the slices that its plan gave it.

Entry: `find_ranges` on the driver, `read_parts` in a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pyspark_tidelog.cluster import RANGES_AT_ONCE, Lease, Lookups, TooManySlices, planned, require_same
from pyspark_tidelog.fetch import open_bucket
from pyspark_tidelog.plan import ManifestPart, PlannedRange, Slice, Task
from tidelog.runtime.errors import ConfigError, CorruptData, InvalidInput, NotFound
from tidelog.storage.objects.manifest import ManifestId, iterate_manifest, read_slices

logger = logging.getLogger(__name__)

AskedRange = tuple[str, int, int, int]
"""Topic, partition, start and end."""


class _Segment(NamedTuple):
    """Neighbouring slices of a planned range that are in one manifest."""

    manifest: ManifestId
    range: int
    slices: int


@dataclass(frozen=True)
class FoundRanges:
    """The ranges of a plan, and where their slices are if tasks are not to carry them."""

    cluster_id: str
    version: int
    """Of the metadata that the first answer is from."""
    ranges: list[PlannedRange]
    _segments: list[list[_Segment]] = field(default_factory=list)
    """Of each range."""

    def place(self, tasks: Sequence[Task]) -> list[Task]:
        """Put parts of manifests in place of the slices of tasks, where they are fewer.

        `tasks` are those of the ranges, in their order.
        """
        if not self._segments:
            return list(tasks)
        where = {(one.topic, one.partition): number for number, one in enumerate(self.ranges)}
        placed: list[Task] = []
        at: dict[int, int] = {}
        for task in tasks:
            if task.is_tail:
                placed.append(task)
                continue
            number = where[task.topic, task.partition]
            slices = self.ranges[number].slices
            first = at.get(number, 0)
            if slices[first] != task.slices[0]:
                first += 1  # the task before did not end inside of a slice
            assert slices[first : first + len(task.slices)] == task.slices, task
            at[number] = first + len(task.slices) - 1
            parts = _parts(self._segments[number], first, first + len(task.slices))
            is_smaller = len(parts) < len(task.slices)
            placed.append(replace(task, slices=(), parts=parts) if is_smaller else task)
        return placed


def _parts(segments: Sequence[_Segment], first: int, end: int) -> tuple[ManifestPart, ...]:
    parts: list[ManifestPart] = []
    begin = 0
    for segment in segments:
        low, high = max(first, begin), min(end, begin + segment.slices)
        if low < high:
            parts.append(ManifestPart(*segment.manifest, segment.range, low - begin, high - low))
        begin += segment.slices
    return tuple(parts)


def find_ranges(
    lookups: Lookups,
    bucket: Mapping[str, str],
    ranges: Sequence[AskedRange],
    lease: Lease,
    *,
    most: int,
) -> FoundRanges:
    """Find the slices of ranges, each of another partition: by answers of brokers or, if there are more, by manifests.

    Raises what `Lookups.slices` raises, and `CorruptData`.
    """
    try:
        return FoundRanges(*lookups.slices(ranges, lease.version, most))
    except TooManySlices:
        pass
    try:
        return _in_manifests(lookups, bucket, ranges, lease)
    except (ConfigError, InvalidInput, NotFound) as error:  # a broker of an older version refuses the path
        logger.warning("no manifest: the tasks carry their slices: %s", error)
        return FoundRanges(*lookups.slices(ranges, lease.version))


def _in_manifests(
    lookups: Lookups, bucket: Mapping[str, str], ranges: Sequence[AskedRange], lease: Lease
) -> FoundRanges:
    cluster_id, version = "", 0
    found: list[PlannedRange] = []
    segments: list[list[_Segment]] = []
    for first in range(0, len(ranges), RANGES_AT_ONCE):
        left = list(ranges[first : first + RANGES_AT_ONCE])
        goes_on = False
        while left:
            answer = lookups.manifest(left, lease)
            cluster_id, version = answer["cluster_id"], version or answer["version"]
            for one, mine in _answered(answer, bucket):
                if goes_on:
                    require_same(found[-1], one)
                # a range that goes on behind a trim begins anew there
                if goes_on and one.start == left[0][2]:
                    one = replace(one, start=found[-1].start, slices=found[-1].slices + one.slices)
                    mine = segments[-1] + mine
                if goes_on:
                    found.pop()
                    segments.pop()
                goes_on = False
                found.append(one)
                segments.append(mine)
            if answer["next"] is None:
                break
            number, start = answer["next"]["range"], answer["next"]["start"]
            goes_on = number < len(answer["ranges"])
            left = [(*left[number][:2], start, left[number][3]), *left[number + 1 :]]
    return FoundRanges(cluster_id, version, found, segments)


def _answered(answer: Any, bucket: Mapping[str, str]) -> list[tuple[PlannedRange, list[_Segment]]]:
    manifest = ManifestId(*answer["manifest"]) if answer["manifest"] is not None else None
    slices: dict[int, list[Slice]] = {}
    if manifest is not None:
        slices = asyncio.run(_read(bucket, answer["cluster_id"], manifest))
    found: list[tuple[PlannedRange, list[_Segment]]] = []
    for number, row in enumerate(answer["ranges"]):
        mine = tuple(slices.get(number, ()))
        if len(mine) != answer["counts"][number]:
            raise CorruptData(f"{manifest} has {len(mine)} slices of {row['topic']}-{row['partition']}, not as told")
        found.append(
            (planned(row, mine), [_Segment(manifest, number, len(mine))] if manifest is not None and mine else [])
        )
    return found


async def _read(bucket: Mapping[str, str], cluster_id: str, manifest: ManifestId) -> dict[int, list[Slice]]:
    store = open_bucket(bucket)
    found: dict[int, list[Slice]] = {}
    try:
        async for number, page in iterate_manifest(store, cluster_id, manifest):
            mine = found.setdefault(number, [])
            mine += (Slice(one.object_id, one.kind, one.size, one.start_offset, one.end_offset) for one in page)
    finally:
        await store.close()
    return found


def read_parts(bucket: Mapping[str, str], cluster_id: str, parts: Sequence[ManifestPart]) -> tuple[Slice, ...]:
    """Read the slices of a task. Raises `ObjectNotFound` when its lease has ended, `CorruptData`, `Unavailable`."""
    return asyncio.run(_read_parts(bucket, cluster_id, parts))


async def _read_parts(bucket: Mapping[str, str], cluster_id: str, parts: Sequence[ManifestPart]) -> tuple[Slice, ...]:
    store = open_bucket(bucket)
    found: list[Slice] = []
    try:
        for part in parts:
            manifest = ManifestId(part.object_id, part.size)
            slices = await read_slices(store, cluster_id, manifest, part.range, part.first, part.slices)
            found += (Slice(one.object_id, one.kind, one.size, one.start_offset, one.end_offset) for one in slices)
    finally:
        await store.close()
    return tuple(found)
