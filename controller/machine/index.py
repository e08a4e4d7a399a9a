"""Indexes derived from the tables, kept by the state machine and by every image.

The index is a pure function of the tables. It is never stored: a member restored from a snapshot builds the same index
as a member that applied every command. `note` is called once for each changed row, with the row before and after.

A *live* slice is a range of a COMMITTED object that lies at least partly at or above its stream's start offset, or in
what a snapshot or a branch holds of the stream (`tidelog.controller.machine.pins`), which need not exist any more. A
stream's live slices are kept in offset order (committed ranges are contiguous, rule 5, and what is held is not replaced
by other objects, so starts are unique) and searched by bisection (`tidelog.controller.machine.slices`). An object
without live slices is *garbage*: it may be destroyed (rule 6).

Entry: `MetadataIndex`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidelog.controller.machine import slices as sl
from tidelog.controller.machine.pins import Pins
from tidelog.controller.model.records import (
    NO_REPLICA_SET,
    STREAMS_PER_PARTITION,
    ObjectRecord,
    ObjectState,
    PartitionRecord,
    StreamRecord,
    TopicRecord,
)
from tidelog.storage.commits import unpack_ranges


class MetadataIndex:
    """All derived indexes over the tables. `slices=False` omits the indexes of objects' ranges, by far the largest."""

    def __init__(self, streams: dict[int, StreamRecord], *, slices: bool = True) -> None:
        """`streams` is the table of streams, in its state at the time of each `note`."""
        self._streams = streams
        self._has_slices = slices
        self._topics: set[bytes] = set()
        self.topic_ids: dict[str, bytes] = {}
        self.folded_names: dict[str, bytes] = {}
        """Topic ids by name with '.' replaced by '_': topics with equal ones would share metric names, as in Kafka."""
        self.partition_of_stream: dict[int, tuple[bytes, int]] = {}
        """Keyed by the partition's first stream id."""
        self.partition_counts: dict[int, int] = {}
        """Partitions placed on each replica set, those of deleted topics included."""
        self.topic_partitions: dict[bytes, int] = {}
        """Partitions of each topic, of deleted ones until they are removed."""
        self.deleted_topics: set[bytes] = set()
        """Topics that are gone and have partitions left."""
        self.moving: set[tuple[bytes, int]] = set()
        """Partitions that have a target, except those of deleted topics."""
        self.unopened: dict[bytes, set[int]] = {}
        """Indexes of the partitions that were never opened, by topic id."""
        self.pins = Pins()
        """What snapshots and branches hold."""
        self.slices: dict[int, sl.Slices] = {}
        self.live_slices: dict[int, int] = {}
        """Number of live slices of each committed object."""
        self.garbage: set[int] = set()
        """Committed objects without a live slice."""
        self.prepared: set[int] = set()
        self.destroyed: set[int] = set()

    def note(self, table: str, old: Any, new: Any) -> None:
        """Update the indexes for one row that changed from `old` to `new` (None: absent)."""
        if table == "objects":
            self._note_object(old, new)
        elif table == "streams":
            self._note_stream(old, new)
        elif table == "partitions":
            self._note_partition(old, new)
        elif table == "topics":
            self._note_topic(old, new)
        elif table == "snapshots":
            self._drop_unheld(self.pins.note_snapshot(old, new))
        elif table == "branches":
            self._drop_unheld(self.pins.note_branch(old, new, self._streams))

    def partition_key(self, stream_id: int) -> tuple[bytes, int] | None:
        """Return the `(topic id, index)` of the partition that owns a stream."""
        return self.partition_of_stream.get(stream_id - stream_id % STREAMS_PER_PARTITION)

    def _note_topic(self, old: TopicRecord | None, new: TopicRecord | None) -> None:
        if old is not None:
            self._topics.discard(old.id)
            self.topic_ids.pop(old.name, None)
            self.folded_names.pop(fold(old.name), None)
            if new is None and old.id in self.topic_partitions:
                self.deleted_topics.add(old.id)
                self.moving = {key for key in self.moving if key[0] != old.id}
        if new is not None:
            self._topics.add(new.id)
            self.deleted_topics.discard(new.id)
            self.topic_ids[new.name] = new.id
            self.folded_names[fold(new.name)] = new.id

    def _note_partition(self, old: PartitionRecord | None, new: PartitionRecord | None) -> None:
        if old is not None:
            self.partition_counts[old.replica_set] -= 1
            self.partition_of_stream.pop(old.first_stream, None)
            self.moving.discard((old.topic_id, old.index))
            if new is None:
                self._count_partition(old.topic_id, -1)
            self._note_opened(old.topic_id, old.index)
        if new is not None:
            if old is None:
                self._count_partition(new.topic_id, 1)
            if new.target != NO_REPLICA_SET and new.topic_id not in self.deleted_topics:
                self.moving.add((new.topic_id, new.index))
            self.partition_counts[new.replica_set] = self.partition_counts.get(new.replica_set, 0) + 1
            self.partition_of_stream[new.first_stream] = (new.topic_id, new.index)
            stream = self._streams.get(new.first_stream)
            if stream is None or stream.epoch < 0:
                self.unopened.setdefault(new.topic_id, set()).add(new.index)

    def _note_opened(self, topic_id: bytes, index: int) -> None:
        indexes = self.unopened.get(topic_id)
        if indexes is not None:
            indexes.discard(index)
            if not indexes:
                del self.unopened[topic_id]

    def _count_partition(self, topic_id: bytes, step: int) -> None:
        """Topics come before their partitions in every command, image and snapshot."""
        count = self.topic_partitions.get(topic_id, 0) + step
        if count == 0:
            del self.topic_partitions[topic_id]
            self.deleted_topics.discard(topic_id)
            return
        self.topic_partitions[topic_id] = count
        if topic_id not in self._topics:
            self.deleted_topics.add(topic_id)

    def _note_stream(self, old: StreamRecord | None, new: StreamRecord | None) -> None:
        if new is not None and new.epoch >= 0 and (old is None or old.epoch < 0):
            key = self.partition_of_stream.get(new.id)
            if key is not None:
                self._note_opened(*key)
        if new is not None and (old is None or new.start_offset > old.start_offset):
            self._drop_unheld(self.pins.note_start(new))
        if old is not None and (new is None or new.start_offset > old.start_offset):
            self._drop_unheld((old.id,))

    def _drop_unheld(self, stream_ids: Iterable[int]) -> None:
        """Drop the slices of streams that lie below the start, or are of a deleted stream, and that nobody holds."""
        for stream_id in stream_ids:
            slices = self.slices.get(stream_id)
            if slices is None:
                continue
            stream = self._streams.get(stream_id)
            left, gone = sl.trimmed(slices, stream.start_offset) if stream is not None else (b"", sl.object_ids(slices))
            if gone and self.pins.is_held(stream_id):
                held = [each for each in sl.unpack(slices)[: len(gone)] if self.pins.holds(stream_id, *each[:2])]
                kept = {object_id for _, _, object_id in held}
                left, gone = sl.pack(held) + left, [each for each in gone if each not in kept]
            if gone:
                self._lost(gone)
                self._put_slices(stream_id, left)

    def _lost(self, object_ids: list[int]) -> None:
        for object_id in object_ids:
            left = self.live_slices[object_id] - 1
            self.live_slices[object_id] = left
            if left == 0:
                self.garbage.add(object_id)

    def _note_object(self, old: ObjectRecord | None, new: ObjectRecord | None) -> None:
        if old is not None:
            if old.state == ObjectState.PREPARED:
                self.prepared.discard(old.id)
            elif old.state == ObjectState.DESTROYED:
                self.destroyed.discard(old.id)
            elif self._has_slices:
                self._remove_slices(old)
        if new is not None:
            if new.state == ObjectState.PREPARED:
                self.prepared.add(new.id)
            elif new.state == ObjectState.DESTROYED:
                self.destroyed.add(new.id)
            elif self._has_slices:
                self._add_slices(new)

    def _add_slices(self, record: ObjectRecord) -> None:
        live = 0
        object_id, streams, all_slices, added = record.id, self._streams, self.slices, sl.added
        for stream_id, start, end in unpack_ranges(record.packed):
            stream = streams.get(stream_id)
            if (stream is not None and end > stream.start_offset) or self.pins.holds(stream_id, start, end):
                all_slices[stream_id] = added(all_slices.get(stream_id, b""), start, end, object_id)
                live += 1
        self.live_slices[record.id] = live
        if live == 0:
            self.garbage.add(record.id)

    def _remove_slices(self, record: ObjectRecord) -> None:
        self.live_slices.pop(record.id, None)
        self.garbage.discard(record.id)
        for stream_id, start, _ in unpack_ranges(record.packed):
            slices = self.slices.get(stream_id)
            if slices is not None:
                self._put_slices(stream_id, sl.removed(slices, start, record.id))

    def _put_slices(self, stream_id: int, slices: sl.Slices) -> None:
        if slices:
            self.slices[stream_id] = slices
        else:
            del self.slices[stream_id]


def fold(name: str) -> str:
    """Return a topic's name as it appears in metric names."""
    return name.replace(".", "_")
