"""The tables of the state machine, with all-or-nothing changes.

A command's handler reads and writes through `Table`; what it writes is staged, visible to itself, and becomes part of
the tables only by `Tables.commit`. A refused (or failing) command is rolled back and leaves no trace, so that every
member ends in the same state whatever went wrong half-way.

`commit` yields the mutations, in the order of the first write to each row, and keeps the `Index` current. The committed
ends of streams go another, shorter way (`Tables.advance`): an upload moves thousands of them at once.
Entry: `Tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from controller.index import Index
from controller.model import (
    BrokerRecord,
    ClusterRecord,
    ConfigRecord,
    ObjectRecord,
    PartitionRecord,
    ReplicaSetRecord,
    StreamRecord,
    TopicRecord,
)

K = TypeVar("K")
R = TypeVar("R")


class Mutation(NamedTuple):
    """One changed row; `record` None: deleted."""

    table: str
    key: Any
    record: Any


class Changes(NamedTuple):
    """What one command changed."""

    mutations: list[Mutation]
    ends: dict[int, StreamRecord]
    """Rows of streams that differ in their committed end, by id; they follow from the committed objects among the
    mutations, which need not tell of them."""


KEY_TYPES: dict[str, Any] = {
    "cluster": str,
    "brokers": int,
    "replica_sets": int,
    "topics": bytes,
    "partitions": tuple[bytes, int],
    "streams": int,
    "objects": int,
    "configs": tuple[str, str],
    "kv": str,
}
"""The public tables: those that images and deltas carry, in the order in which an image must be loaded."""

RECORD_TYPES: dict[str, Any] = {
    "cluster": ClusterRecord,
    "brokers": BrokerRecord,
    "replica_sets": ReplicaSetRecord,
    "topics": TopicRecord,
    "partitions": PartitionRecord,
    "streams": StreamRecord,
    "objects": ObjectRecord,
    "configs": ConfigRecord,
    "kv": bytes,
}


class Table(Generic[K, R]):
    """One table: rows, and what the current command has staged."""

    def __init__(self, name: str, touched: list[tuple[Table[Any, Any], Any]]) -> None:
        self.name = name
        self.rows: dict[K, R] = {}
        self.staged: dict[K, R | None] = {}
        self._touched = touched

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        """Committed rows."""
        return len(self.rows)

    def get(self, key: K) -> R | None:
        """The row as the current command sees it."""
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
        """Committed rows, in insertion order. Not for decisions that depend on order: sort first."""
        return iter(self.rows.values())


class Tables:
    """All tables, the counters and the clock of the state machine."""

    def __init__(self) -> None:
        self._touched: list[tuple[Table[Any, Any], Any]] = []
        touched = self._touched
        self.cluster: Table[str, ClusterRecord] = Table("cluster", touched)
        self.brokers: Table[int, BrokerRecord] = Table("brokers", touched)
        self.replica_sets: Table[int, ReplicaSetRecord] = Table("replica_sets", touched)
        self.topics: Table[bytes, TopicRecord] = Table("topics", touched)
        self.partitions: Table[tuple[bytes, int], PartitionRecord] = Table("partitions", touched)
        self.streams: Table[int, StreamRecord] = Table("streams", touched)
        self.objects: Table[int, ObjectRecord] = Table("objects", touched)
        self.configs: Table[tuple[str, str], ConfigRecord] = Table("configs", touched)
        self.kv: Table[str, bytes] = Table("kv", touched)
        self.counters: Table[str, int] = Table("counters", touched)
        """Private: next ids. Not part of images."""
        self.index = Index(self.streams.rows)
        self._ends: dict[int, StreamRecord] = {}
        self.now_ms = 0
        """The latest time any command carried; never goes back."""

    def public(self) -> Iterator[Table[Any, Any]]:
        """The tables that images and deltas carry."""
        return (getattr(self, name) for name in KEY_TYPES)

    def delete_delay_ms(self) -> int:
        """How long destroyed objects stay in the bucket."""
        row = self.cluster.get("")
        return row.delete_delay_ms if row is not None else 0

    def take_ids(self, counter: str, count: int, first: int) -> int:
        """Give out `count` consecutive ids; `first` is where the counter starts."""
        value = self.counters.get(counter)
        value = first if value is None else value
        self.counters.put(counter, value + count)
        return value

    def advance(self, ends: dict[int, StreamRecord]) -> None:
        """Stage rows of existing streams that differ in their committed end alone, because of objects staged with them.

        A command that does so stages no other row of a stream.
        """
        assert not self._ends and not self.streams.staged
        self._ends = ends

    def commit(self) -> Changes:
        """Make what is staged part of the tables. Returns what has changed of public tables."""
        mutations: list[Mutation] = []
        ends, self._ends = self._ends, {}
        self.streams.rows.update(ends)
        for table, key in self._touched:
            old = table.rows.get(key)
            new = table.staged.pop(key)
            if old == new:
                continue
            if new is None:
                del table.rows[key]
            else:
                table.rows[key] = new
            if table is not self.counters:
                self.index.note(table.name, old, new)
                mutations.append(Mutation(table.name, key, new))
        self._touched.clear()
        return Changes(mutations, ends)

    def rollback(self) -> None:
        """Forget what is staged."""
        self._ends = {}
        for table, key in self._touched:
            table.staged.pop(key, None)
        self._touched.clear()
