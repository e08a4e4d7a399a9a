"""The tasks of a read: which offsets of which partitions each one reads, and from which objects. No I/O.

A range of a partition up to its committed end is cut into tasks of about `max_bytes`, also inside of an object; what
lies behind is one task that reads from the brokers. How many bytes of an object belong to a range is estimated: an
object is divided among the slices of the plan that it holds, by their numbers of offsets.

Invariants: the tasks of a partition are contiguous and cover exactly its range, in order; every task has the slices
that overlap it.

Entry: `plan_tasks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STREAM_PARTS = ("meta", "data", "time", "txn")
"""The streams of a partition, whose ids follow one another in this order, from a multiple of their number on."""
DATA = STREAM_PARTS.index("data")


class Slice(NamedTuple):
    """The part of an object that belongs to a partition: what `POST /slices` tells."""

    object_id: int
    kind: int
    size: int
    """Bytes of the whole object."""
    start: int
    end: int


class SharedOffsets(NamedTuple):
    """Offsets of a branch that objects have under the id of another topic's stream (docs/design/0031)."""

    stream: int
    start: int
    end: int
    """What the objects have under that stream's id from here on is not the branch's."""


def stream_in(piece: Slice, stream: int, shared: Sequence[SharedOffsets]) -> int:
    """Return the id under which an object has its slice of a stream, which never goes beyond a cut."""
    return next((one.stream for one in shared if one.start < piece.end <= one.end), stream)


@dataclass(frozen=True)
class PlannedRange:
    """The offsets of one partition that are to be read: `[start, end)`."""

    topic: str
    topic_id: str
    """32 hexadecimal digits: a topic that was created again has another one."""
    partition: int
    stream: int
    start: int
    end: int
    committed_end: int
    """What lies before it is in the bucket."""
    slices: tuple[Slice, ...]
    """Those that hold `[start, min(end, committed_end))`, in order."""
    shared: tuple[SharedOffsets, ...] = ()
    """Of a branch; offsets behind are under `stream`."""


class ManifestPart(NamedTuple):
    """Slices of one range of a manifest, which a task reads from there."""

    object_id: int
    size: int
    """Bytes of the manifest."""
    range: int
    """The number of the range in it."""
    first: int
    """The number of the first slice."""
    slices: int


@dataclass(frozen=True)
class Task:
    """What one task reads: `[start, end)` of a partition. Pickled to an executor."""

    topic: str
    partition: int
    stream: int
    start: int
    end: int
    slices: tuple[Slice, ...]
    """Empty where they are in manifests, or the task reads from the brokers."""
    parts: tuple[ManifestPart, ...] = ()
    """Where to find the slices in manifests."""
    shared: tuple[SharedOffsets, ...] = ()
    """See `PlannedRange`."""

    @property
    def is_tail(self) -> bool:
        """Whether it reads from the brokers."""
        return not self.slices and not self.parts


def plan_tasks(
    ranges: Sequence[PlannedRange], *, max_bytes: int, max_records: int = 0, min_tasks: int = 0, reads_tail: bool = True
) -> list[Task]:
    """Cut ranges into tasks of up to about `max_bytes` and `max_records` (0: any number), at least `min_tasks`.

    There are fewer if there are fewer offsets, or if few of these have most of the bytes. Without `reads_tail` what is
    not in the bucket is left out.
    """
    share = _shares(ranges)
    if min_tasks > 1:
        total = sum(_wanted_bytes(one, share) for one in ranges)
        max_bytes = max(1, min(max_bytes, int(total / min_tasks)))
    tasks: list[Task] = []
    for one in ranges:
        tasks += _cut(one, share, max_bytes, max_records)
        if reads_tail and one.end > max(one.start, one.committed_end):
            start = max(one.start, one.committed_end)
            tasks.append(Task(one.topic, one.partition, one.stream, start, one.end, ()))
    return tasks


def _shares(ranges: Sequence[PlannedRange]) -> Counter[int]:
    """Return the number of offsets that each object holds of all ranges."""
    offsets: Counter[int] = Counter()
    for one in ranges:
        for each in one.slices:
            offsets[each.object_id] += each.end - each.start
    return offsets


def _weight(piece: Slice, share: Counter[int]) -> float:
    return piece.size * (piece.end - piece.start) / share[piece.object_id]


def _wanted_bytes(one: PlannedRange, share: Counter[int]) -> float:
    """Estimate the bytes of a range, without what its first and last object have outside of it."""
    clipped = ((each, min(each.end, one.end) - max(each.start, one.start)) for each in one.slices)
    return sum(_weight(each, share) * offsets / (each.end - each.start) for each, offsets in clipped)


def _cut(one: PlannedRange, share: Counter[int], max_bytes: int, max_records: int) -> Iterator[Task]:
    end = min(one.end, one.committed_end)
    start = at = one.start
    taken: list[Slice] = []
    room = float(max_bytes)
    for piece in one.slices:
        assert piece.start <= at, (one, piece)
        last = min(piece.end, end)
        per_offset = max(_weight(piece, share) / (piece.end - piece.start), 1e-9)
        while at < last:
            fits = last - at if room >= per_offset * (last - at) else int(room / per_offset)
            if start == at:
                fits = max(fits, 1)
            if max_records:
                fits = min(fits, max_records - (at - start))
            if fits > 0:
                taken.append(piece)
                step = min(fits, last - at)
                at, room = at + step, room - per_offset * step
            if at < last:
                yield Task(one.topic, one.partition, one.stream, start, at, tuple(taken), shared=one.shared)
                start, taken, room = at, [], float(max_bytes)
    if taken:
        yield Task(one.topic, one.partition, one.stream, start, at, tuple(taken), shared=one.shared)
    assert at >= end, (at, one)
