"""Which objects hold ranges of offsets of partitions: what a reader outside the cluster asks for (docs/design/0018).

An answer is bounded by a number of slices, and says where the next question begins. The questions of one plan may be
answered from metadata of different versions, all as new as the reader's lease or newer: the records of a range are the
same in all of them.

Invariant: the slices of a range follow one another without a gap, from `start` or before, up to `end`, to the committed
end, or to where the answer was full; unless the log starts later, which the answer tells.

The first offsets of a branch are in objects under the ids of other topics' streams (docs/design/0031): the answer tells
which, up to where. They are refused to who does not say that it reads such an answer: by the branch's own id it would
find nothing in these objects, and take that for an end. A slice ends within one of these ranges, or behind them all.

Entry: `look_up`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidelog.controller.image.image import Image
from tidelog.controller.model.wal_notes import DATA_STREAM
from tidelog.runtime.errors import InvalidInput, NotFound
from tidelog.storage.commits import ObjectSlice

MAX_RANGES = 1_000
"""Ranges in one question."""
MAX_SLICES = 10_000
"""Slices in one answer, which is found and encoded within some milliseconds."""
TO_THE_END = -1


class OffsetRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A range of offsets of a partition."""

    topic: str
    partition: int
    start: int = 0
    """The first offset (int64)."""
    end: int = TO_THE_END
    """The offset after the last one (int64); -1: the committed end, as it is when the question is answered."""


class SharedRange(msgspec.Struct, frozen=True, array_like=True):
    """Offsets of a branch that are another topic's, too."""

    stream: int
    start: int
    end: int


class FoundRange(msgspec.Struct, frozen=True):
    """What is known of one range."""

    topic: str
    topic_id: str
    """32 hexadecimal digits: a topic that was created again has another one."""
    partition: int
    stream: int
    """The data stream: its offsets are Kafka's."""
    start: int
    end: int
    """As asked for, with the committed end in place of -1."""
    log_start: int
    """The first offset that exists. What lies below is not to be read, also where a slice has it."""
    committed_end: int
    """What is uploaded ends here; a later tail is at the brokers."""
    slices: list[ObjectSlice]
    """`[object id, kind, bytes of the object, start, end]`, with the offsets of the object's whole range, which of a
    branch's ends at its cut at the latest."""
    shared: list[SharedRange] = []
    """Of a branch `[stream, start, end]`, in order: objects have these offsets under that stream's id, and what the
    same objects have under it from `end` on is not the branch's. Offsets behind are under `stream`."""


class NextQuestion(msgspec.Struct, frozen=True):
    """Where an answer that was full ends."""

    range: int
    """Index of the range that is to be asked for next, with those after it."""
    start: int
    """Its offset to go on at."""


class FoundSlices(msgspec.Struct, frozen=True):
    """The answer to a question."""

    cluster_id: str
    version: int
    """The metadata version that it is from."""
    ranges: list[FoundRange]
    """Those of the question, up to where the answer is full."""
    next: NextQuestion | None
    """None: the answer is complete."""


def look_up(
    image: Image, ranges: Sequence[OffsetRange], limit: int = MAX_SLICES, *, reads_shared: bool = False
) -> FoundSlices:
    """Find the slices of up to `MAX_RANGES` ranges, `limit` of them at most (1 to `MAX_SLICES`).

    `reads_shared`: who asks reads what a branch shares under the streams that `FoundRange.shared` names.
    Raises `NotFound` for an unknown topic or partition, `InvalidInput`.
    """
    if not 0 < len(ranges) <= MAX_RANGES:
        raise InvalidInput(f"a question has 1 to {MAX_RANGES} ranges, not {len(ranges)}")
    if not 0 < limit <= MAX_SLICES:
        raise InvalidInput(f"limit is {limit}: 1 to {MAX_SLICES} is expected")
    found: list[FoundRange] = []
    left = limit
    for number, one in enumerate(ranges):
        if left == 0:
            return FoundSlices(image.cluster_id, image.version, found, NextQuestion(number, one.start))
        row = _look_up_one(image, one, left, reads_shared=reads_shared)
        found.append(row)
        left -= len(row.slices)
        reached = row.slices[-1].end_offset if row.slices else row.end
        if left == 0 and reached < min(row.end, row.committed_end):
            return FoundSlices(image.cluster_id, image.version, found, NextQuestion(number, reached))
    return FoundSlices(image.cluster_id, image.version, found, None)


def _look_up_one(image: Image, asked: OffsetRange, limit: int, *, reads_shared: bool) -> FoundRange:
    topic = image.topic(asked.topic)
    if topic is None:
        raise NotFound(f"there is no topic {asked.topic!r}", hint="`tidelog topic list` shows the topics")
    partition = image.partition(topic.id, asked.partition)
    if partition is None:
        raise NotFound(f"topic {topic.name} has {topic.partitions} partitions, and no partition {asked.partition}")
    stream = image.streams[partition.first_stream + DATA_STREAM]
    end = stream.end_offset if asked.end == TO_THE_END else asked.end
    if not asked.start >= 0 or (asked.end != TO_THE_END and end < asked.start):
        raise InvalidInput(f"{topic.name}-{asked.partition}: range {asked.start}..{asked.end} is reversed or negative")
    start, own_start = max(asked.start, stream.start_offset), image.own_start(stream.id)
    if start < min(end, own_start) and not reads_shared:
        raise InvalidInput(
            f"{topic.name}-{asked.partition} is a branch: its offsets below {own_start} are in another topic's objects",
            hint="a newer version of the reader reads these, too (it asks with ?shared=true); the brokers give them to"
            " any Kafka client",
        )
    return FoundRange(
        topic.name,
        topic.id.hex(),
        asked.partition,
        stream.id,
        asked.start,
        end,
        stream.start_offset,
        stream.end_offset,
        _slices(image, stream.id, start, end, limit),
        [SharedRange(one.stream_id, one.start_offset, one.end_offset) for one in image.shared(stream.id)],
    )


def _slices(image: Image, stream_id: int, start: int, end: int, limit: int) -> list[ObjectSlice]:
    """Find objects under one stream's id after the other."""
    found: list[ObjectSlice] = []
    while start < end and len(found) < limit:
        _, within = image.resolve(stream_id, start, end)
        assert start < within <= end, (stream_id, start, within, end)
        found += image.find_objects(stream_id, start, within, limit - len(found))
        start = within
    return found
