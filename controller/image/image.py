"""`Image`: a read-only copy of the metadata at one version, kept current by deltas, with derived indexes.

A broker's client holds one, and so does the controller's RPC server. Deltas are applied in order and completely: a
reader on the event loop never sees half of a command. Records are immutable, so a reader may keep one, although it
becomes outdated.

The delta of a commit carries the object and not its streams, because their new committed ends follow from the object's
ranges. `Delta.ends` has these rows when the state machine is in the same process, and shares them with it; otherwise
they are computed here.

Entry: `Image`, `Delta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from tidelog.controller.machine.index import MetadataIndex
from tidelog.controller.machine.slices import find
from tidelog.controller.machine.tables import KEY_TYPES, RowChange
from tidelog.controller.model.leases import LeaseRecord
from tidelog.controller.model.overrides import NO_OVERRIDES
from tidelog.controller.model.records import (
    NO_BROKER,
    STREAMS_PER_PARTITION,
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
from tidelog.controller.model.replication import ElectionRecord, ReplicationRecord, replica_count
from tidelog.controller.model.snapshots import BranchRecord, Extents, SnapshotRecord, extent_at
from tidelog.runtime.steps import Steps, at_once
from tidelog.storage.commits import ObjectSlice, unpack_ranges
from tidelog.storage.replication.configuration import SetConfiguration

PLACEMENT_TABLES = frozenset({"cluster", "brokers", "replica_sets", "topics", "partitions", "configs", "snapshots"})
"""The tables of `Image.placement_version`."""
STEP_ROWS: Final = 5_000
"""Rows of one step: a whole image has millions, each of which takes a microsecond or two."""


def _places(table: str, old: Any, new: Any) -> bool:
    """Whether a changed row of a placement table changes more than the committed WAL offset."""
    if table != "replica_sets" or old is None or new is None:
        return True
    return bool(msgspec.structs.replace(old, committed_wal_offset=new.committed_wal_offset) != new)


def _first_opened(old: StreamRecord | None, new: StreamRecord | None) -> bool:
    """Whether a stream was opened for the first time: its partition has a leader to announce from here on."""
    return new is not None and new.epoch >= 0 and (old is None or old.epoch < 0)


class Delta(NamedTuple):
    """The changes of one command, or of a reload."""

    version: int
    """The image's version after the delta."""
    mutations: list[RowChange]
    ends: dict[int, StreamRecord] | None = None
    """Rows of streams whose committed end has moved; None: they are computed from the committed objects."""

    def of(self, table: str) -> Iterator[RowChange]:
        """Iterate over the changed rows of one table."""
        return (mutation for mutation in self.mutations if mutation.table == table)

    def advanced(self) -> Iterator[int]:
        """Iterate over the ids of streams whose committed end may have moved by objects; `of` has no rows of these."""
        if self.ends is not None:
            yield from self.ends
            return
        for _, _, record in self.of("objects"):
            if record is not None and record.state == ObjectState.COMMITTED:
                for stream_id, _, _ in unpack_ranges(record.packed):
                    yield stream_id


class Image:
    """The metadata at one version. Use it on the event loop's thread only."""

    def __init__(self, *, finds_objects: bool = True) -> None:
        """Without `finds_objects` lookups of objects find nothing: a controller's copy only serves followers."""
        self.version = 0
        """Index of the last command that is contained (int64)."""
        self.placement_version = 0
        """Version of the last change of topics, partitions, brokers, configurations, leaders or snapshots, or of the
        first opening of a partition. Commits of objects, which are frequent, do not change it, so that data derived
        from placements stays valid."""
        self.leaders_version = 0
        """Version of the last change of brokers, or of the leader of any replica set."""
        self.topic_versions: dict[bytes, int] = {}
        """Version of the last change of each topic or of one of its partitions."""
        self.brokers: dict[int, BrokerRecord] = {}
        self.replica_sets: dict[int, ReplicaSetRecord] = {}
        self.replication: dict[int, ReplicationRecord] = {}
        """Rows of replica sets that have, or shall have, several members."""
        self.topics: dict[bytes, TopicRecord] = {}
        self.snapshots: dict[str, SnapshotRecord] = {}
        self.branches: dict[int, BranchRecord] = {}
        self.streams: dict[int, StreamRecord] = {}
        self.objects: dict[int, ObjectRecord] = {}
        self.configs: dict[tuple[str, str], ConfigRecord] = {}
        self.kv: dict[str, bytes] = {}
        self.leases: dict[int, LeaseRecord] = {}
        self.index = MetadataIndex(self.streams, slices=finds_objects)
        self._finds_objects = finds_objects
        self._cluster: dict[str, ClusterRecord] = {}
        self._partitions: dict[tuple[bytes, int], PartitionRecord] = {}

    @property
    def cluster_id(self) -> str:
        """Return Kafka's cluster id; empty before the first command."""
        row = self._cluster.get("")
        return row.id if row is not None else ""

    @property
    def cluster(self) -> ClusterRecord | None:
        """Return the only row of table `cluster`."""
        return self._cluster.get("")

    @property
    def topic_ids(self) -> dict[str, bytes]:
        """Return topic ids by name."""
        return self.index.topic_ids

    @property
    def level(self) -> int:
        """Return the cluster's feature level."""
        return self.cluster.level if self.cluster is not None else 0

    @property
    def cluster_configs(self) -> Mapping[str, str]:
        """Return the overrides that count for all brokers and controllers; another object when they have changed."""
        return self.configs.get(("cluster", ""), NO_OVERRIDES)

    def table(self, name: str) -> dict[Any, Any]:
        """Return the rows of a table by its name in `tidelog.controller.model.records`. Raises `KeyError`."""
        if name == "cluster":
            return self._cluster
        if name == "partitions":
            return self._partitions
        if name not in KEY_TYPES:
            raise KeyError(name)
        rows: dict[Any, Any] = getattr(self, name)
        return rows

    def apply(self, delta: Delta) -> None:
        """Apply one delta. Versions only grow."""
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
                if (table in PLACEMENT_TABLES and _places(table, old, record)) or (
                    table == "streams" and _first_opened(old, record)
                ):
                    places = True
                    self._note_placement(table, key, delta.version)
        self.version = delta.version
        if places:
            self.placement_version = delta.version

    def _move_ends(self, record: ObjectRecord) -> None:
        """Move the committed ends of an object's streams to the ends of its ranges."""
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
        elif table == "streams":
            partition = self.index.partition_key(key)
            if partition is not None and partition[0] in self.topics:
                self.topic_versions[partition[0]] = version
        elif table in ("brokers", "replica_sets"):
            self.leaders_version = version

    def difference(self, newer: Image) -> list[RowChange]:
        """As `difference_steps`, at once."""
        return at_once(self.difference_steps(newer))

    def difference_steps(self, newer: Image) -> Steps[list[RowChange]]:
        """Return the mutations that turn this image's rows into those of `newer`, in loading order.

        In steps of `STEP_ROWS` rows, between which neither image may change.

        Of snapshots and branches those that begin come first, and those that end last: one may hold what another has
        held, and nothing else. In between the index would lose it for good.
        """
        found = {}
        for name in KEY_TYPES:
            found[name] = yield from self._difference_of(name, newer)
        holders = found.pop("snapshots") + found["branches"]
        found["branches"] = sorted(holders, key=lambda each: (each.record is None, each.key in self.table(each.table)))
        return [each for mutations in found.values() for each in mutations]

    def _difference_of(self, name: str, newer: Image) -> Steps[list[RowChange]]:
        ours, theirs = self.table(name), newer.table(name)
        found: list[RowChange] = []
        keys = iter(ours)
        while some := list(islice(keys, STEP_ROWS)):
            found += [RowChange(name, key, None) for key in some if key not in theirs]
            yield
        rows = iter(theirs.items())
        while changed := list(islice(rows, STEP_ROWS)):
            found += [RowChange(name, key, record) for key, record in changed if ours.get(key) != record]
            yield
        return found

    def rows(self) -> Iterable[tuple[str, dict[Any, Any]]]:
        """Return all tables in loading order."""
        return ((name, self.table(name)) for name in KEY_TYPES)

    def topic(self, name: str) -> TopicRecord | None:
        """Return the topic of this name."""
        topic_id = self.index.topic_ids.get(name)
        return self.topics.get(topic_id) if topic_id is not None else None

    def partition(self, topic_id: bytes, index: int) -> PartitionRecord | None:
        """Return one partition; None for one of a deleted topic, too."""
        return self._partitions.get((topic_id, index)) if topic_id in self.topics else None

    def partitions(self, topic_id: bytes) -> list[PartitionRecord]:
        """Return all partitions of a topic, by index; empty for an unknown topic."""
        topic = self.topics.get(topic_id)
        return [] if topic is None else [self._partitions[topic_id, index] for index in range(topic.partitions)]

    def all_partitions(self) -> Iterator[PartitionRecord]:
        """Iterate over all partitions of all topics."""
        topics = self.topics
        return (record for record in self._partitions.values() if record.topic_id in topics)

    def owned(self, replica_set_id: int) -> list[PartitionRecord]:
        """Return the partitions that a replica set owns, those of deleted topics included until they are removed."""
        return [record for record in self._partitions.values() if record.replica_set == replica_set_id]

    def stream(self, stream_id: int) -> StreamRecord | None:
        """Return one stream; None for one of a deleted topic, too."""
        key = self.index.partition_key(stream_id)
        return self.streams.get(stream_id) if key is None or key[0] in self.topics else None

    def leader(self, partition: PartitionRecord) -> tuple[int, int]:
        """Return `(broker id or -1, leader epoch)`: the master of the replica set, if it is alive."""
        record = self.replica_sets.get(partition.replica_set)
        if record is None:
            return NO_BROKER, partition.epoch_base
        master = self.brokers.get(record.master)
        leader = record.master if master is not None and master.alive else NO_BROKER
        return leader, partition.epoch_base + record.master_epoch

    def was_opened(self, partition: PartitionRecord) -> bool:
        """Return whether a partition has been opened once. Its four streams are opened by one command."""
        return partition.index not in self.index.unopened.get(partition.topic_id, ())

    def announced_leader(self, partition: PartitionRecord) -> tuple[int, int]:
        """As `leader`, for clients: a partition has no leader before it was opened for the first time.

        A client that is told of a leader sends at once; what it sends without acknowledgements or retries would be
        lost.
        """
        leader, epoch = self.leader(partition)
        return (leader if self.was_opened(partition) else NO_BROKER), epoch

    def master_of(self, replica_set_id: int) -> BrokerRecord | None:
        """Return the live master of a replica set."""
        record = self.replica_sets.get(replica_set_id)
        master = self.brokers.get(record.master) if record is not None else None
        return master if master is not None and master.alive else None

    def replica_count(self, replica_set_id: int) -> int:
        """Return how many replicas a replica set has, or gets (`tidelog.controller.model.replication`)."""
        record = self.replica_sets.get(replica_set_id)
        return 0 if record is None else replica_count(record, self.replication.get(replica_set_id), len(self.brokers))

    def configuration(self, replica_set_id: int) -> SetConfiguration | None:
        """Return the SyncStateSet and write quorum of a replica set; None if its members' WALs are not known.

        They are not for a set of one member whose master has not told its WAL.
        """
        record, row = self.replica_sets.get(replica_set_id), self.replication.get(replica_set_id)
        if record is None or row is None or not row.in_sync:
            return None
        return row.configuration(record.sync_state_set_epoch)

    def election(self, replica_set_id: int) -> ElectionRecord | None:
        """Return the election under way for the present master epoch of a replica set of several members."""
        row = self.replication.get(replica_set_id)
        return row.election if row is not None else None

    def is_held(self, object_id: int) -> bool:
        """Return whether a snapshot or a branch holds an object, which is then not replaced by another one."""
        record = self.objects.get(object_id)
        return (
            bool(self.index.pins)
            and record is not None
            and record.state == ObjectState.COMMITTED
            and self.index.pins.holds_any(unpack_ranges(record.packed))
        )

    def moving(self) -> list[PartitionRecord]:
        """Return the partitions that have a target, in order."""
        return [self._partitions[key] for key in sorted(self.index.moving)]

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> list[ObjectSlice]:
        """See `tidelog.storage.managers.ObjectManager.find_objects`: O(log n) and the slices returned."""
        assert self._finds_objects
        within = 0
        if self.branches:
            stream_id, within = self._extent(stream_id, start_offset)
            end_offset = min(end_offset, within) if within else end_offset
        slices = self.index.slices.get(stream_id)
        if slices is None or start_offset >= end_offset:
            return []
        found: list[ObjectSlice] = []
        for start, end, object_id in find(slices, start_offset, end_offset, limit):
            record = self.objects[object_id]
            found.append(ObjectSlice(record.id, record.kind, record.size, start, min(end, within) if within else end))
        return found

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        """See `tidelog.storage.managers.ObjectManager.resolve`."""
        if not self.branches:
            return stream_id, end_offset
        source, within = self._extent(stream_id, start_offset)
        return source, min(end_offset, within) if within else end_offset

    def own_start(self, stream_id: int) -> int:
        """Return where the offsets begin that objects have under the stream's own id; 0 if it is no branch's."""
        place = stream_id % STREAMS_PER_PARTITION
        branch = self.branches.get(stream_id - place)
        return branch.ends[place] if branch is not None else 0

    def shared(self, stream_id: int) -> Extents:
        """Return the offsets of a branch's stream that are under other streams' ids, in order; empty if it is none."""
        place = stream_id % STREAMS_PER_PARTITION
        branch = self.branches.get(stream_id - place)
        return branch.extents[place] if branch is not None else ()

    def _extent(self, stream_id: int, offset: int) -> tuple[int, int]:
        """Return the stream under whose id objects have an offset, and where that ends; 0: it does not."""
        place = stream_id % STREAMS_PER_PARTITION
        branch = self.branches.get(stream_id - place)
        extent = extent_at(branch.extents[place], offset) if branch is not None else None
        return (stream_id, 0) if extent is None else (extent.stream_id, extent.end_offset)
