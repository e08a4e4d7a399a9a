"""What snapshots and branches hold: objects and bytes of each, and what only it keeps in the bucket.

An object that is held stays in the bucket as it is, whole, also where a part of it would do. What a deletion frees is
what no stream with that range and no other holder needs. The figures are those of the local metadata.

Entry: `describe_snapshots`, `describe_snapshot`, `describe_branches`; `has_left`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidelog.controller.model.records import ObjectRecord, TopicRecord
from tidelog.controller.model.snapshots import BranchRecord, HeldPartition, SnapshotRecord
from tidelog.storage.commits import StreamRange, unpack_ranges

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

DATA = 1
"""The data stream's place among the streams of a partition."""
_CHUNK = 2_000
"""Ranges and slices that are looked at before the loop serves requests again: about a millisecond."""

_Group = tuple[str, bytes]
"""A snapshot's name, or the id of a topic that is a branch: the other one is empty."""
_STREAMS: _Group = ("*", b"*")
"""Stands for a stream that has a range itself."""


@dataclass(slots=True)
class _Weighed:
    objects: set[int] = field(default_factory=set)
    size_bytes: int = 0
    only_objects: int = 0
    only_bytes: int = 0

    def row(self) -> dict[str, int]:
        return {
            "objects": len(self.objects),
            "object_bytes": self.size_bytes,
            "only_objects": self.only_objects,
            "only_bytes": self.only_bytes,
        }


class _Pace:
    """Lets the loop serve requests between pieces of work."""

    def __init__(self) -> None:
        self._left = _CHUNK

    async def did(self, count: int) -> None:
        self._left -= count
        if self._left <= 0:
            self._left = _CHUNK
            await asyncio.sleep(0)


async def describe_snapshots(image: Image) -> list[dict[str, Any]]:
    """Return all snapshots by name, as JSON."""
    records = [record for _, record in sorted(image.snapshots.items())]
    held = await _weigh(image, {(one.name, b""): [extent for _, extent in one.extents()] for one in records})
    return [_snapshot_row(record, held[record.name, b""]) for record in records]


async def describe_snapshot(image: Image, record: SnapshotRecord) -> dict[str, Any]:
    """Return one snapshot as JSON, with its topics and partitions."""
    group = (record.name, b"")
    held = await _weigh(image, {group: [extent for _, extent in record.extents()]})
    partitions = [
        {"topic": topic.name, "topic_id": topic.id.hex(), "partition": index, **_offsets(partition)}
        for topic in record.topics
        for index, partition in enumerate(topic.partitions)
    ]
    return {**_snapshot_row(record, held[group]), "partitions_held": partitions}


async def describe_branches(image: Image) -> list[dict[str, Any]]:
    """Return the topics that share objects with the topic that they are a branch of, by name, as JSON."""
    branches = _branches(image)
    held = await _weigh(image, {("", one.id): [*_left(image, rows)] for one, rows in branches})
    return [
        {
            "topic": topic.name,
            "source": rows[0].source,
            "partitions": len(rows),
            "shared": sum(each.end_offset - each.start_offset for each in _left(image, rows, DATA)),
            "own": sum(max(0, _end(image, each) - each.ends[DATA]) for each in rows),
            **held["", topic.id].row(),
        }
        for topic, rows in branches
    ]


def _branches(image: Image) -> list[tuple[TopicRecord, list[BranchRecord]]]:
    found: dict[bytes, list[BranchRecord]] = {}
    for first_stream, row in sorted(image.branches.items()):
        key = image.index.partition_key(first_stream)
        if key is not None and key[0] in image.topics:
            found.setdefault(key[0], []).append(row)
    return sorted(((image.topics[topic_id], rows) for topic_id, rows in found.items()), key=lambda each: each[0].name)


def _left(image: Image, rows: Iterable[BranchRecord], only: int = -1) -> Iterator[StreamRange]:
    """Yield the extents of branches, without what they have trimmed; `only`: of one place."""
    for row in rows:
        for place, extents in enumerate(row.extents):
            stream = image.streams.get(row.first_stream + place)
            if stream is None or only not in (-1, place):
                continue
            for each in extents:
                start = max(each.start_offset, stream.start_offset)
                if start < each.end_offset:
                    yield StreamRange(each.stream_id, start, each.end_offset)


def _end(image: Image, row: BranchRecord) -> int:
    stream = image.streams.get(row.first_stream + DATA)
    return stream.end_offset if stream is not None else 0


def _offsets(partition: HeldPartition) -> dict[str, Any]:
    data = partition.extents[DATA]
    return {
        "start_offset": partition.starts[DATA],
        "end_offset": partition.ends[DATA],
        "leader_epoch": partition.leader_epoch,
        "shared": bool(data) and data[0].stream_id != partition.first_stream + DATA,
    }


def _snapshot_row(record: SnapshotRecord, held: _Weighed) -> dict[str, Any]:
    return {
        "name": record.name,
        "version": record.version,
        "created_ms": record.created_ms,
        "topics": [topic.name for topic in record.topics],
        "partitions": record.partition_count,
        "records": sum(each.ends[DATA] - each.starts[DATA] for topic in record.topics for each in topic.partitions),
        **held.row(),
    }


async def _weigh(image: Image, groups: Mapping[_Group, Sequence[StreamRange]]) -> dict[_Group, _Weighed]:
    """Return what each group holds."""
    pace = _Pace()
    found = {group: _Weighed() for group in groups}
    for group, extents in groups.items():
        for extent in extents:
            found[group].objects.update(await _objects(image, extent, pace))
    for object_id in sorted({each for held in found.values() for each in held.objects}):
        row = image.objects.get(object_id)
        if row is None:
            continue  # it was given up meanwhile
        needed = await _needed_by(image, row, pace)
        for group, held in found.items():
            if object_id in held.objects:
                held.size_bytes += row.size
                if needed == {group}:
                    held.only_objects += 1
                    held.only_bytes += row.size
    return found


async def _objects(image: Image, extent: StreamRange, pace: _Pace) -> set[int]:
    found: set[int] = set()
    at = extent.start_offset
    while at < extent.end_offset:
        slices = image.find_objects(extent.stream_id, at, extent.end_offset, _CHUNK)
        await pace.did(1 + len(slices))
        if not slices:
            break
        found.update(each.object_id for each in slices)
        at = slices[-1].end_offset
    return found


def has_left(image: Image, stream_id: int, end_offset: int) -> bool:
    """Return whether a stream itself still has some of a range that ends at `end_offset`."""
    stream = image.streams.get(stream_id)
    return stream is not None and end_offset > stream.start_offset


async def _needed_by(image: Image, row: ObjectRecord, pace: _Pace) -> set[_Group]:
    """Return who needs an object."""
    needed: set[_Group] = set()
    ranges = unpack_ranges(row.packed)
    await pace.did(len(ranges))
    for stream_id, start, end in ranges:
        if has_left(image, stream_id, end):
            needed.add(_STREAMS)
        for name, first_stream in image.index.pins.holders(stream_id, start, end):
            key = image.index.partition_key(first_stream)
            needed.add((name, b"") if name else ("", key[0] if key is not None else b""))
    return needed
