"""The tables of the state machine, with atomic changes.

The handler of a command reads and writes through `Table`. Its writes are staged, visible to the handler, and become
part of the tables only by `Tables.commit`. A command that is refused or fails is rolled back without effect, so that
every member reaches the same state. That holds for a `commit` that fails half-way, too (`Tables.revert`).

`commit` yields the mutations in the order of the first write to each row, and keeps the `MetadataIndex` current. The
committed ends of streams take a shorter path (`Tables.advance`): an upload moves thousands of them at once.

Deadlines are in *cluster time*, which no wall clock moves: milliseconds that elapse, by its monotonic clock, while a
controller is active; the next active one goes on where the log says that its predecessor was. It begins with the wall
clock of the first command, so that it is near the real time and deadlines of older versions keep their meaning.

Entry: `Tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from tidelog.controller.machine.index import MetadataIndex
from tidelog.controller.model.leases import LeaseRecord
from tidelog.controller.model.levels import LEASES_LEVEL, REPLICATION_LEVEL, SNAPSHOTS_LEVEL
from tidelog.controller.model.records import (
    BrokerRecord,
    ClusterRecord,
    ConfigRecord,
    ObjectRecord,
    PartitionRecord,
    ReplicaSetRecord,
    StreamRecord,
    TopicRecord,
)
from tidelog.controller.model.replication import ReplicationRecord
from tidelog.controller.model.snapshots import BranchRecord, SnapshotRecord

K = TypeVar("K")
R = TypeVar("R")


class RowChange(NamedTuple):
    """One changed row; `record` is None for a deleted row."""

    table: str
    key: Any
    record: Any


class Changes(NamedTuple):
    """The changes of one command."""

    mutations: list[RowChange]
    ends: dict[int, StreamRecord]
    """Rows of streams whose committed end alone changed, by id. They follow from the committed objects among the
    mutations, so the mutations do not carry them."""


KEY_TYPES: dict[str, Any] = {
    "cluster": str,
    "brokers": int,
    "replica_sets": int,
    "replication": int,
    "topics": bytes,
    "partitions": tuple[bytes, int],
    "snapshots": str,
    "branches": int,
    "streams": int,
    "objects": int,
    "configs": tuple[str, str],
    "kv": str,
    "leases": int,
}
"""The public tables: those that images and deltas carry, in the order in which an image is loaded.

What holds objects comes before them, so that none is ever taken for garbage.
"""

FIRST_LEVEL_OF_TABLES = {
    "replication": REPLICATION_LEVEL,
    "leases": LEASES_LEVEL,
    "snapshots": SNAPSHOTS_LEVEL,
    "branches": SNAPSHOTS_LEVEL,
}
"""Tables that a state below a feature level has no row of, and does not name."""

RECORD_TYPES: dict[str, Any] = {
    "cluster": ClusterRecord,
    "brokers": BrokerRecord,
    "replica_sets": ReplicaSetRecord,
    "replication": ReplicationRecord,
    "topics": TopicRecord,
    "partitions": PartitionRecord,
    "snapshots": SnapshotRecord,
    "branches": BranchRecord,
    "streams": StreamRecord,
    "objects": ObjectRecord,
    "configs": ConfigRecord,
    "kv": bytes,
    "leases": LeaseRecord,
}


class Table(Generic[K, R]):
    """One table: its rows, and the rows that the current command has staged."""

    def __init__(self, name: str, touched: list[tuple[Table[Any, Any], Any]]) -> None:
        self.name = name
        self.rows: dict[K, R] = {}
        self.staged: dict[K, R | None] = {}
        self._touched = touched

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        """Return the number of committed rows."""
        return len(self.rows)

    def get(self, key: K) -> R | None:
        """Return a row, staged or committed."""
        if key in self.staged:
            return self.staged[key]
        return self.rows.get(key)

    def put(self, key: K, record: R) -> None:
        """Stage a row."""
        self._touch(key)
        self.staged[key] = record

    def delete(self, key: K) -> None:
        """Stage a deletion."""
        self._touch(key)
        self.staged[key] = None

    def _touch(self, key: K) -> None:
        if key not in self.staged:
            self._touched.append((self, key))

    def values(self) -> Iterator[R]:
        """Iterate over committed rows in insertion order. Sort them before a decision that depends on order."""
        return iter(self.rows.values())


class Tables:
    """All tables, the counters and the clock of the state machine."""

    def __init__(self) -> None:
        self._touched: list[tuple[Table[Any, Any], Any]] = []
        touched = self._touched
        self.cluster: Table[str, ClusterRecord] = Table("cluster", touched)
        self.brokers: Table[int, BrokerRecord] = Table("brokers", touched)
        self.replica_sets: Table[int, ReplicaSetRecord] = Table("replica_sets", touched)
        self.replication: Table[int, ReplicationRecord] = Table("replication", touched)
        self.topics: Table[bytes, TopicRecord] = Table("topics", touched)
        self.partitions: Table[tuple[bytes, int], PartitionRecord] = Table("partitions", touched)
        self.snapshots: Table[str, SnapshotRecord] = Table("snapshots", touched)
        self.branches: Table[int, BranchRecord] = Table("branches", touched)
        self.streams: Table[int, StreamRecord] = Table("streams", touched)
        self.objects: Table[int, ObjectRecord] = Table("objects", touched)
        self.configs: Table[tuple[str, str], ConfigRecord] = Table("configs", touched)
        self.kv: Table[str, bytes] = Table("kv", touched)
        self.leases: Table[int, LeaseRecord] = Table("leases", touched)
        self.counters: Table[str, int] = Table("counters", touched)
        """Next ids. Not part of images."""
        self.index = MetadataIndex(self.streams.rows)
        self._ends: dict[int, StreamRecord] = {}
        self._replaced: list[tuple[Table[Any, Any], Any, Any]] = []
        """Rows as they were before the last `commit`, in its order."""
        self.now_ms = 0
        """Wall clock of the last command's proposer: for times that users see, and for no decision."""
        self.time_ms = 0
        """Cluster time at the last command; never decreases. See the module docstring."""
        self.log_index = 0
        """Index of the command that is being applied."""
        self.level = 0
        """Feature level by whose rules it is applied."""

    def public(self) -> Iterator[Table[Any, Any]]:
        """Iterate over the tables that images and deltas carry."""
        return (getattr(self, name) for name in KEY_TYPES)

    def delete_delay_ms(self) -> int:
        """Return how long destroyed objects stay in the bucket at least, in milliseconds of cluster time."""
        row = self.cluster.get("")
        return row.delete_delay_ms if row is not None else 0

    def take_ids(self, counter: str, count: int, first: int) -> int:
        """Allocate `count` consecutive ids; `first` is the initial value of the counter."""
        value = self.counters.get(counter)
        value = first if value is None else value
        self.counters.put(counter, value + count)
        return value

    def advance(self, ends: dict[int, StreamRecord]) -> None:
        """Stage rows of existing streams that differ in their committed end alone, because of objects staged with them.

        Such a command stages no other row of a stream.
        """
        assert not self._ends and not self.streams.staged
        self._ends = ends

    def commit(self) -> Changes:
        """Apply the staged rows to the tables. Returns the changes of public tables.

        If it raises, because of a defect, the tables are in between: call `revert`.
        """
        mutations: list[RowChange] = []
        ends, self._ends = self._ends, {}
        streams = self.streams
        replaced: list[tuple[Table[Any, Any], Any, Any]] = [(streams, key, streams.rows[key]) for key in ends]
        self._replaced = replaced
        streams.rows.update(ends)
        for table, key in self._touched:
            old = table.rows.get(key)
            new = table.staged.pop(key)
            if old == new:
                continue
            replaced.append((table, key, old))
            if new is None:
                del table.rows[key]
            else:
                table.rows[key] = new
            if table is not self.counters:
                self.index.note(table.name, old, new)
                mutations.append(RowChange(table.name, key, new))
        self._touched.clear()
        return Changes(mutations, ends)

    def rollback(self) -> None:
        """Discard the staged rows."""
        self._ends = {}
        for table, key in self._touched:
            table.staged.pop(key, None)
        self._touched.clear()

    def revert(self) -> None:
        """Discard the staged rows, take the last `commit` back, be it finished or not, and build the index anew.

        Building it takes as long as loading a snapshot does. This is for defects only.
        """
        self.rollback()
        replaced, self._replaced = self._replaced, []
        if not replaced:
            return
        for table, key, old in reversed(replaced):
            if old is None:
                table.rows.pop(key, None)
            else:
                table.rows[key] = old
        index = MetadataIndex(self.streams.rows)
        for table in self.public():
            for row in table.values():
                index.note(table.name, None, row)
        self.index = index

    def settle(self) -> None:
        """The last `commit` stands; `revert` leaves it alone from now on."""
        self._replaced = []
