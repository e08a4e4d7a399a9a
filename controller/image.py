"""`Image`: a read-only copy of the metadata at one version, kept current by deltas, with derived indexes.

A broker's client holds one, and so does the controller's RPC server. Deltas are applied in order and whole: a reader on
the event loop never sees half of a command. Records are immutable; holding one is safe, it just gets old.

A delta of a commit names the object and not its streams: where their committed ends are now follows from the object's
ranges. `Delta.ends` has those rows ready where the state machine is in the same process, and they are shared with it;
where it is not, they are made here.

Entry: `Image`, `Delta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from controller.index import Index
from controller.model import (
    NO_BROKER,
    BrokerRecord,
    ClusterRecord,
    ConfigRecord,
    ObjectRecord,
    ObjectState,
    PartitionRecord,
    ReplicaSetRecord,
    StreamRecord,
    TopicRecord,
)
from controller.slices import find
from controller.tables import KEY_TYPES, Mutation
from storage.managers import ObjectSlice, unpack_ranges

PLACEMENT_TABLES = frozenset({"cluster", "brokers", "replica_sets", "topics", "partitions", "configs"})
"""What `Image.placement_version` follows."""


def _places(table: str, old: Any, new: Any) -> bool:
    """Whether a changed row of a placement table changes more than what is committed of a WAL."""
    if table != "replica_sets" or old is None or new is None:
        return True
    return bool(msgspec.structs.replace(old, committed_wal_offset=new.committed_wal_offset) != new)


class Delta(NamedTuple):
    """What one command (or a fresh image) changed."""

    version: int
    """The image's version afterwards."""
    mutations: list[Mutation]
    ends: dict[int, StreamRecord] | None = None
    """The rows of streams whose committed end has moved; None: they are to be found from the committed objects."""

    def of(self, table: str) -> Iterator[Mutation]:
        """The changed rows of one table."""
        return (mutation for mutation in self.mutations if mutation.table == table)


class Image:
    """See the module. All methods are for the event loop's thread."""

    def __init__(self, *, finds_objects: bool = True) -> None:
        """Without `finds_objects` the object lookups stay empty: the controller's own copy is for others to load."""
        self.version = 0
        """Index of the last command contained (int64)."""
        self.placement_version = 0
        """Version of the last change of topics, partitions, brokers, configurations, or who leads what. Commits of
        objects, which come many times a second, leave it as it is: what depends on it is not made anew for them."""
        self.leaders_version = 0
        """Version of the last change of brokers, or of who leads any replica set."""
        self.topic_versions: dict[bytes, int] = {}
        """Version of the last change of each topic or of one of its partitions."""
        self.brokers: dict[int, BrokerRecord] = {}
        self.replica_sets: dict[int, ReplicaSetRecord] = {}
        self.topics: dict[bytes, TopicRecord] = {}
        self.streams: dict[int, StreamRecord] = {}
        self.objects: dict[int, ObjectRecord] = {}
        self.configs: dict[tuple[str, str], ConfigRecord] = {}
        self.kv: dict[str, bytes] = {}
        self.index = Index(self.streams, slices=finds_objects)
        self._finds_objects = finds_objects
        self._cluster: dict[str, ClusterRecord] = {}
        self._partitions: dict[tuple[bytes, int], PartitionRecord] = {}

    @property
    def cluster_id(self) -> str:
        """Kafka's cluster id; empty before the first command."""
        row = self._cluster.get("")
        return row.id if row is not None else ""

    @property
    def cluster(self) -> ClusterRecord | None:
        """The cluster's one row."""
        return self._cluster.get("")

    @property
    def topic_ids(self) -> dict[str, bytes]:
        """Topic id by name."""
        return self.index.topic_ids

    def table(self, name: str) -> dict[Any, Any]:
        """The rows of a table by its name in `controller.model`. Raises `KeyError`."""
        if name == "cluster":
            return self._cluster
        if name == "partitions":
            return self._partitions
        if name not in KEY_TYPES:
            raise KeyError(name)
        rows: dict[Any, Any] = getattr(self, name)
        return rows

    def apply(self, delta: Delta) -> None:
        """Take one delta. Versions only grow."""
        assert delta.version >= self.version, (delta.version, self.version)
        places = False
        if delta.ends is not None:
            self.streams.update(delta.ends)
        for table, key, record in delta.mutations:
            rows = self.table(table)
            old = rows.get(key)
            if record is None:
                rows.pop(key, None)
            else:
                rows[key] = record
            if old is not record:
                if table == "objects" and record is not None and delta.ends is None:
                    self._move_ends(record)
                self.index.note(table, old, record)
                if table in PLACEMENT_TABLES and _places(table, old, record):
                    places = True
                    self._note_placement(table, key, delta.version)
        self.version = delta.version
        if places:
            self.placement_version = delta.version

    def _move_ends(self, record: ObjectRecord) -> None:
        """A committed object carries its streams up to where its ranges end."""
        if record.state != ObjectState.COMMITTED:
            return
        streams = self.streams
        for stream_id, _, end in unpack_ranges(record.packed):
            stream = streams.get(stream_id)
            if stream is not None and stream.end_offset < end:
                streams[stream_id] = stream.ending_at(end)

    def _note_placement(self, table: str, key: Any, version: int) -> None:
        if table == "topics":
            if key in self.topics:
                self.topic_versions[key] = version
            else:
                self.topic_versions.pop(key, None)
        elif table == "partitions":
            if key[0] in self.topics:
                self.topic_versions[key[0]] = version
        elif table in ("brokers", "replica_sets"):
            self.leaders_version = version

    def difference(self, newer: Image) -> list[Mutation]:
        """The mutations that make this image's rows those of `newer`, in loading order."""
        mutations: list[Mutation] = []
        for name in KEY_TYPES:
            ours, theirs = self.table(name), newer.table(name)
            mutations += [Mutation(name, key, None) for key in ours if key not in theirs]
            mutations += [Mutation(name, key, record) for key, record in theirs.items() if ours.get(key) != record]
        return mutations

    def rows(self) -> Iterable[tuple[str, dict[Any, Any]]]:
        """All tables in loading order."""
        return ((name, self.table(name)) for name in KEY_TYPES)

    def topic(self, name: str) -> TopicRecord | None:
        """The topic of this name."""
        topic_id = self.index.topic_ids.get(name)
        return self.topics.get(topic_id) if topic_id is not None else None

    def partition(self, topic_id: bytes, index: int) -> PartitionRecord | None:
        """One partition."""
        return self._partitions.get((topic_id, index))

    def partitions(self, topic_id: bytes) -> list[PartitionRecord]:
        """All partitions of a topic, by index; empty for an unknown topic."""
        topic = self.topics.get(topic_id)
        return [] if topic is None else [self._partitions[topic_id, index] for index in range(topic.partitions)]

    def all_partitions(self) -> Iterator[PartitionRecord]:
        """All partitions of all topics."""
        return iter(self._partitions.values())

    def leader(self, partition: PartitionRecord) -> tuple[int, int]:
        """`(broker id or -1, leader epoch)`: the master of the replica set, if it is alive."""
        record = self.replica_sets.get(partition.replica_set)
        if record is None:
            return NO_BROKER, partition.epoch_base
        master = self.brokers.get(record.master)
        leader = record.master if master is not None and master.alive else NO_BROKER
        return leader, partition.epoch_base + record.master_epoch

    def master_of(self, replica_set_id: int) -> BrokerRecord | None:
        """The living master of a replica set."""
        record = self.replica_sets.get(replica_set_id)
        master = self.brokers.get(record.master) if record is not None else None
        return master if master is not None and master.alive else None

    def moving(self) -> list[PartitionRecord]:
        """The partitions that have a target, in order."""
        return [self._partitions[key] for key in sorted(self.index.moving)]

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> list[ObjectSlice]:
        """See `storage.managers.ObjectManager.find_objects`: O(log n) and the slices returned."""
        assert self._finds_objects
        slices = self.index.slices.get(stream_id)
        if slices is None or start_offset >= end_offset:
            return []
        found: list[ObjectSlice] = []
        for start, end, object_id in find(slices, start_offset, end_offset, limit):
            record = self.objects[object_id]
            found.append(ObjectSlice(record.id, record.kind, record.size, start, end))
        return found
