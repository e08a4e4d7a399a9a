"""The compactor's view of the metadata, and JSON reports of the compactor's plans.

The replica set that compacts an object is the owner of most of the streams in it; in a tie, the one with the smallest
id. For a stream object that is the owner; for a stream-set object it is nearly always the writer, and after its
partitions have moved away, the owner of most of them. This only divides the work: if two brokers compact the same
object at the same time, the controller accepts the first and refuses the second.

Entry: `ImageView`, `facts_of`, `describe_plan`, `waiting_object`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from tidelog.broker.objects.report import stream_owners
from tidelog.controller.model.records import ObjectRecord, ObjectState
from tidelog.runtime.errors import NotFound
from tidelog.storage.commits import ObjectKind, StreamRange
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import CompactionTask

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

_CHUNK = 2_000
"""Stream ranges processed between two yields to the event loop (at least two per object): about a millisecond."""


class ImageView:
    """See `tidelog.storage.compaction.compactor.CompactionView`; on the image that `image` returns."""

    def __init__(self, image: Callable[[], Image], replica_sets: Callable[[], Collection[int]]) -> None:
        """`replica_sets`: those whose objects this broker compacts, because it is their master."""
        self._image = image
        self._replica_sets = replica_sets

    async def objects(self) -> list[ObjectFacts]:
        """The committed objects that these replica sets compact, by id: none that a snapshot or a branch holds."""
        image, mine = self._image(), self._replica_sets()
        ids = sorted(image.index.live_slices)
        found: list[ObjectFacts] = []
        looked_at = 0
        for object_id in ids:
            looked_at += 2
            facts = facts_of(image, object_id)
            if facts is not None and facts.live:
                looked_at += len(facts.ranges)
                if not image.is_held(object_id) and _owner_of(image, facts.kind, facts.ranges) in mine:
                    found.append(facts)
            if looked_at >= _CHUNK:
                looked_at = 0
                await asyncio.sleep(0)
        return found

    def facts(self, object_id: int) -> ObjectFacts | None:
        """See `facts_of`."""
        return facts_of(self._image(), object_id)

    def is_committed(self, object_id: int) -> bool:
        """Whether the metadata still names the object."""
        record = self._image().objects.get(object_id)
        return record is not None and record.state == ObjectState.COMMITTED

    def was_committed(self, object_id: int) -> bool:
        """Whether the metadata names the object, or did so: an id that was never used has no kind."""
        record = self._image().objects.get(object_id)
        return record is not None and record.state != ObjectState.PREPARED and record.kind != 0

    def start_offset(self, stream_id: int) -> int | None:
        """The start offset of a stream; None if it no longer exists."""
        stream = self._image().streams.get(stream_id)
        return stream.start_offset if stream is not None else None


def facts_of(image: Image, object_id: int) -> ObjectFacts | None:
    """Return what the planner knows of an object; None if it is not committed."""
    record = image.objects.get(object_id)
    if record is None or record.state != ObjectState.COMMITTED:
        return None
    live = image.index.live_slices.get(object_id, 0)
    return ObjectFacts(record.id, record.kind, record.size, record.since_ms, record.ranges, live)


def _owner_of(image: Image, kind: int, ranges: Sequence[StreamRange]) -> int | None:
    """Return the replica set that compacts an object; None if nobody owns anything in it."""
    owners: Counter[int] = Counter()
    for piece in ranges:
        stream = image.streams.get(piece.stream_id)
        if stream is not None:
            owners[stream.replica_set] += 1
            if kind == ObjectKind.STREAM:
                break
    if not owners:
        return None
    most = max(owners.values())
    return min(owner for owner, count in owners.items() if count == most)


def waiting_object(record: ObjectRecord | None) -> tuple[str, int] | None:
    """State and expiry (ms since the epoch) of an uncommitted object's record; None for other objects."""
    if record is None or record.state == ObjectState.COMMITTED:
        return None
    return ObjectState(record.state).name.lower(), record.expires_ms


def streams_of(image: Image, topic: str) -> set[int] | None:
    """The streams of a topic; None if the topic does not exist."""
    record = image.topic(topic)
    if record is None:
        return None
    return {each.first_stream + part for each in image.partitions(record.id) for part in range(4)}


def wanted_tasks(image: Image, topics: Sequence[str]) -> Callable[[CompactionTask], bool] | None:
    """Return a filter of tasks with data of these topics; None for no topics. Raises `NotFound`."""
    if not topics:
        return None
    streams: set[int] = set()
    for name in topics:
        mine = streams_of(image, name)
        if mine is None:
            raise NotFound(f"topic {name!r} does not exist", hint="`tidelog topic list` shows the topics")
        streams |= mine
    return lambda task: not streams.isdisjoint(task.streams)


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
