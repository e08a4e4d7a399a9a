"""What is derived from the tables: indexes that both the state machine and every image keep.

The index is a pure function of the tables: it is never stored, and a member restored from a snapshot has the same one
as a member that applied every command. `note` is called once for each changed row, with the row before and after.

A *live* slice is a range of a COMMITTED object that lies at least partly at or above its stream's start offset. A
stream's live slices are kept in offset order (committed ranges are contiguous, rule 5, so starts are unique) and
searched by bisection. An object without live slices is *garbage*: it may be destroyed (rule 6).

Entry: `Index`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

from controller.model import (
    NO_REPLICA_SET,
    STREAMS_PER_PARTITION,
    ObjectRecord,
    ObjectState,
    PartitionRecord,
    StreamRecord,
    TopicRecord,
)
from storage.managers import StreamRange


class StreamSlices:
    """The live slices of one stream in offset order: start, end and object id of each, one after another in one list.

    Nearly all streams have one slice or a few, and every process keeps several indexes: what a list costs counts.
    """

    __slots__ = ("_flat",)

    def __init__(self) -> None:
        self._flat: list[int] = []

    def __len__(self) -> int:
        return len(self._flat) // 3

    def __getitem__(self, at: int) -> tuple[int, int, int]:
        """Start offset, end offset and object id of the slice at a position (0 ≤ at < len)."""
        start, end, object_id = self._flat[3 * at : 3 * at + 3]
        return start, end, object_id

    def object_ids(self) -> list[int]:
        """The objects of all slices."""
        return self._flat[2::3]

    def _starts_before(self, offset: int) -> int:
        """How many slices start below `offset`."""
        flat = self._flat
        return bisect_left(range(len(flat) // 3), offset, key=lambda at: flat[3 * at])

    def _ends_up_to(self, offset: int) -> int:
        """How many slices end at or below `offset`."""
        flat = self._flat
        return bisect_right(range(len(flat) // 3), offset, key=lambda at: flat[3 * at + 1])

    def add(self, start: int, end: int, object_id: int) -> None:
        """Insert a slice; nearly always at the end."""
        flat = self._flat
        if not flat or start > flat[-3]:
            flat += (start, end, object_id)
        else:
            at = 3 * self._starts_before(start)
            flat[at:at] = (start, end, object_id)

    def remove(self, start: int, object_id: int) -> bool:
        """Take one slice out; False if it is not here."""
        at = self._starts_before(start)
        if at == len(self) or self._flat[3 * at] != start or self._flat[3 * at + 2] != object_id:
            return False
        del self._flat[3 * at : 3 * at + 3]
        return True

    def trim(self, start_offset: int) -> list[int]:
        """Take out what lies wholly below `start_offset`; the object ids."""
        cut = 3 * self._ends_up_to(start_offset)
        gone = self._flat[2:cut:3]
        del self._flat[:cut]
        return gone

    def find(self, start_offset: int, end_offset: int, limit: int) -> range:
        """Positions of at most `limit` slices that overlap `[start_offset, end_offset)`."""
        first = self._ends_up_to(start_offset)
        return range(first, min(self._starts_before(end_offset), first + limit))


class Index:
    """All derived indexes over the tables; without `slices` all but those over objects' ranges, by far the largest."""

    def __init__(self, *, slices: bool = True) -> None:
        self._has_slices = slices
        self.topic_ids: dict[str, bytes] = {}
        self.folded_names: dict[str, bytes] = {}
        """Topic ids by name with '.' as '_': two names that fold alike would share metric names (as Kafka)."""
        self.partition_of_stream: dict[int, tuple[bytes, int]] = {}
        """By the partition's first stream id."""
        self.partition_counts: dict[int, int] = {}
        """Partitions placed on each replica set."""
        self.moving: set[tuple[bytes, int]] = set()
        """Partitions that have a target."""
        self.slices: dict[int, StreamSlices] = {}
        self.live_slices: dict[int, int] = {}
        """Count for each committed object."""
        self.garbage: set[int] = set()
        """Committed objects without a live slice."""
        self.prepared: set[int] = set()
        self.destroyed: set[int] = set()
        self._start_offsets: dict[int, int] = {}

    def note(self, table: str, old: Any, new: Any) -> None:
        """One row changed from `old` to `new` (None: absent)."""
        if table == "objects":
            self._note_object(old, new)
        elif table == "streams":
            self._note_stream(old, new)
        elif table == "partitions":
            self._note_partition(old, new)
        elif table == "topics":
            self._note_topic(old, new)

    def partition_key(self, stream_id: int) -> tuple[bytes, int] | None:
        """`(topic id, index)` of the partition that owns a stream."""
        return self.partition_of_stream.get(stream_id - stream_id % STREAMS_PER_PARTITION)

    def _note_topic(self, old: TopicRecord | None, new: TopicRecord | None) -> None:
        if old is not None:
            self.topic_ids.pop(old.name, None)
            self.folded_names.pop(fold(old.name), None)
        if new is not None:
            self.topic_ids[new.name] = new.id
            self.folded_names[fold(new.name)] = new.id

    def _note_partition(self, old: PartitionRecord | None, new: PartitionRecord | None) -> None:
        if old is not None:
            self.partition_counts[old.replica_set] -= 1
            self.partition_of_stream.pop(old.first_stream, None)
            self.moving.discard((old.topic_id, old.index))
        if new is not None:
            if new.target != NO_REPLICA_SET:
                self.moving.add((new.topic_id, new.index))
            self.partition_counts[new.replica_set] = self.partition_counts.get(new.replica_set, 0) + 1
            self.partition_of_stream[new.first_stream] = (new.topic_id, new.index)

    def _note_stream(self, old: StreamRecord | None, new: StreamRecord | None) -> None:
        record = new or old
        assert record is not None
        slices = self.slices.get(record.id)
        if new is None:
            self._start_offsets.pop(record.id, None)
            if slices is not None:
                self._lost(slices.object_ids())
                del self.slices[record.id]
            return
        if self._has_slices:
            self._start_offsets[new.id] = new.start_offset
        if slices is not None and old is not None and new.start_offset > old.start_offset:
            self._lost(slices.trim(new.start_offset))
            if not len(slices):
                del self.slices[new.id]

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

    def _is_live(self, piece: StreamRange) -> bool:
        start_offset = self._start_offsets.get(piece.stream_id)
        return start_offset is not None and piece.end_offset > start_offset

    def _add_slices(self, record: ObjectRecord) -> None:
        live = 0
        for piece in record.ranges:
            if self._is_live(piece):
                slices = self.slices.get(piece.stream_id)
                if slices is None:
                    slices = self.slices[piece.stream_id] = StreamSlices()
                slices.add(piece.start_offset, piece.end_offset, record.id)
                live += 1
        self.live_slices[record.id] = live
        if live == 0:
            self.garbage.add(record.id)

    def _remove_slices(self, record: ObjectRecord) -> None:
        self.live_slices.pop(record.id, None)
        self.garbage.discard(record.id)
        for piece in record.ranges:
            slices = self.slices.get(piece.stream_id)
            if slices is not None and slices.remove(piece.start_offset, record.id) and not len(slices):
                del self.slices[piece.stream_id]


def fold(name: str) -> str:
    """A topic's name as metrics see it."""
    return name.replace(".", "_")
