"""What the compactor of this broker sees of the metadata, and what people see of the compactor.

Which replica set compacts an object: the one that owns most of the streams in it, of several the one with the smallest
id. That is the owner for a stream object; for a stream-set object it is nearly always the one that wrote it, and when
its partitions have moved away, the one that most of them moved to. It is a division of work, no more: two brokers that
compact the same object at once do no harm, since the controller takes the first and refuses the second.

Entry: `ImageView`, `describe_plan`, `waiting_object`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from broker.object_report import stream_owners
from controller.model import ObjectRecord, ObjectState
from storage.compaction_plan import CompactionTask, ObjectFacts
from storage.managers import ObjectKind, StreamRange

if TYPE_CHECKING:
    from controller.image import Image

_CHUNK = 2_000
"""Stream ranges looked at before others get a turn (an object counts as two at least): about a millisecond."""


class ImageView:
    """See `storage.compactor.CompactionView`; over the image that `image` gives."""

    def __init__(self, image: Callable[[], Image], replica_set_id: int) -> None:
        self._image = image
        self._replica_set_id = replica_set_id

    async def objects(self) -> list[ObjectFacts]:
        """The committed objects that this replica set compacts, by id."""
        image = self._image()
        ids = sorted(image.index.live_slices)
        found: list[ObjectFacts] = []
        looked_at = 0
        for object_id in ids:
            record = image.objects.get(object_id)
            live = image.index.live_slices.get(object_id, 0)
            looked_at += 2
            if record is not None and live and record.state == ObjectState.COMMITTED:
                ranges = record.ranges
                looked_at += len(ranges)
                if self._is_ours(image, record.kind, ranges):
                    found.append(ObjectFacts(record.id, record.kind, record.size, record.since_ms, ranges, live))
            if looked_at >= _CHUNK:
                looked_at = 0
                await asyncio.sleep(0)
        return found

    def _is_ours(self, image: Image, kind: int, ranges: Sequence[StreamRange]) -> bool:
        owners: Counter[int] = Counter()
        for piece in ranges:
            stream = image.streams.get(piece.stream_id)
            if stream is not None:
                owners[stream.replica_set] += 1
                if kind == ObjectKind.STREAM:
                    break
        if not owners:
            return False
        most = max(owners.values())
        return min(owner for owner, count in owners.items() if count == most) == self._replica_set_id

    def is_committed(self, object_id: int) -> bool:
        """Whether the metadata still names the object."""
        record = self._image().objects.get(object_id)
        return record is not None and record.state == ObjectState.COMMITTED

    def start_offset(self, stream_id: int) -> int | None:
        """Where a stream starts; None if it does not exist any more."""
        stream = self._image().streams.get(stream_id)
        return stream.start_offset if stream is not None else None


def waiting_object(record: ObjectRecord | None) -> tuple[str, int] | None:
    """State and end (ms since the epoch) of an object's record that is not committed; None for any other."""
    if record is None or record.state == ObjectState.COMMITTED:
        return None
    return ObjectState(record.state).name.lower(), record.expires_ms


def streams_of(image: Image, topic: str) -> set[int] | None:
    """The streams of a topic; None if there is no such topic."""
    record = image.topic(topic)
    if record is None:
        return None
    return {each.first_stream + part for each in image.partitions(record.id) for part in range(4)}


def describe_plan(image: Image, tasks: Sequence[CompactionTask]) -> list[dict[str, Any]]:
    """The tasks of a plan as JSON, with the topics whose data they move."""
    owners = stream_owners(image)
    rows = []
    for task in tasks:
        topics = sorted({owner["topic"] for stream in task.streams if (owner := owners.get(stream)) is not None})
        rows.append(
            {
                "kind": task.kind,
                "inputs": [one.object_id for one in task.inputs],
                "bytes": task.size,
                "estimated_bytes": task.estimated_bytes,
                "streams": len(task.streams),
                "topics": topics,
                "reason": task.reason,
            }
        )
    return rows
