"""Records of the controller, as stored in the state, in images and on the wire (msgpack arrays).

Records are plain, immutable data: a command replaces them. No record is part of a reference cycle, so the numerous
small ones are not tracked by the garbage collector (`gc=False`). Tables are dictionaries with the keys noted below; a
delta is a list of `(table, key, record or None)`. Fields may be added at the end with a default, never removed or
reordered, because old snapshots and journals must still load.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from tidelog.storage.commits import StreamRange, pack_ranges
from tidelog.stream.opened import OpenedStream

NO_BROKER = -1
NO_REPLICA_SET = -1
BUCKET_WAL = "s3"
"""The kind of WAL that any broker can take over: one in the bucket."""

PartitionKey = tuple[bytes, int]
"""Topic id (16 bytes) and partition index (int32)."""


NO_RANGES = pack_ranges(())
_ranges: msgspec.msgpack.Decoder[tuple[StreamRange, ...]] = msgspec.msgpack.Decoder(tuple[StreamRange, ...])


class StreamState(IntEnum):
    """Whether a stream has an owner that may append."""

    CLOSED = 0
    OPENED = 1


class ObjectState(IntEnum):
    """State of an object in the metadata."""

    PREPARED = 0
    """The id is allocated; no metadata names the object yet."""
    COMMITTED = 1
    DESTROYED = 2
    """No metadata names the object. It is deleted from the bucket after the delay, and then removed from the
    metadata."""


class DrainMode(IntEnum):
    """Whether and for how long a broker is drained."""

    NONE = 0
    SHUTDOWN = 1
    """Until the process has stopped and registers again."""
    OPERATOR = 2
    """Until an operator ends the drain."""


class BrokerRecord(msgspec.Struct, frozen=True, array_like=True):
    """Table `brokers`, key: broker id (int32)."""

    id: int
    check_code: str
    """Check code of the broker's identity; distinguishes two directories with the same id."""
    host: str
    """Host to which Kafka clients connect."""
    port: int
    rack: str
    admin_url: str
    incarnation: str
    """Random id of the process; replaced by a newer registration."""
    registration_epoch: int
    """Grows with each registration (int64)."""
    alive: bool
    draining: int = DrainMode.NONE
    """A `DrainMode`."""
    wal_kind: str = ""
    """Where the broker keeps its WAL: `disk`, `s3` or `memory`; empty: an older broker that does not report it."""
    peer_address: str = ""
    """`host:port` of its listener for other brokers; empty: none."""
    directory: str = ""
    """Identifies the data directory and its machine: a copy has another value. Empty: not reported."""


class ReplicaSetRecord(msgspec.Struct, frozen=True, array_like=True):
    """Table `replica_sets`, key: id (the id of the broker that is its preferred master)."""

    id: int
    members: tuple[int, ...]
    learners: tuple[int, ...]
    master: int
    """Broker id, or -1."""
    master_epoch: int
    sync_state_set: tuple[int, ...]
    sync_state_set_epoch: int
    committed_wal_offset: int
    """Committed WAL offset (int64 bytes)."""
    successor: int = NO_BROKER
    """The broker that recovers a dead master's WAL from the bucket, or -1. While it is set there is no master."""
    takeover_since_ms: int = 0
    """When the takeover began."""


MAX_TOPIC_CHARS = 249
"""Of a topic's name, as in Kafka. A request may have a longer one, which no topic has."""


class TopicRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `topics`, key: topic id (16 bytes)."""

    id: bytes
    name: str
    partitions: int
    configs: dict[str, str]
    """Overrides only, with Kafka's names."""
    internal: bool
    created_ms: int


class PartitionRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `partitions`, key: (topic id, index).

    Leader = master of the replica set. Leader epoch = `epoch_base` + that replica set's master epoch, so an election
    changes no partition record; a move sets `epoch_base` so that the leader epoch grows. While a partition moves,
    `replica_set` is its current owner and `target` the placement that was committed last
    (docs/design/0006-partition-moves.md).
    """

    topic_id: bytes
    index: int
    replica_set: int
    epoch_base: int
    first_stream: int
    """Stream ids: meta = first_stream, data = +1, time = +2, txn = +3."""
    target: int = NO_REPLICA_SET
    """The target of the move in progress, or -1."""
    moving_since_ms: int = 0
    """When the move was committed."""


class StreamRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `streams`, key: stream id (int64)."""

    id: int
    epoch: int
    """-1 before the first open."""
    state: int
    """A `StreamState`."""
    replica_set: int
    start_offset: int
    end_offset: int
    """Committed end."""
    owner_since_epoch: int
    quarantined: str = ""
    """Reason of the quarantine, or empty."""
    released_at: int = -1
    """The committed end at the last release from quarantine; -1: never."""

    def as_opened(self) -> OpenedStream:
        """Return the fields that the opener of the stream needs."""
        return OpenedStream(
            self.id, self.epoch, self.start_offset, self.end_offset, self.owner_since_epoch, self.released_at
        )

    def ending_at(self, end_offset: int) -> StreamRecord:
        """Return the row after a commit up to `end_offset`. Three times as fast as `msgspec.structs.replace`."""
        return StreamRecord(
            self.id,
            self.epoch,
            self.state,
            self.replica_set,
            self.start_offset,
            end_offset,
            self.owner_since_epoch,
            self.quarantined,
            self.released_at,
        )


class ObjectRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `objects`, key: object id (int64)."""

    id: int
    state: int
    """An `ObjectState`."""
    kind: int
    """A `tidelog.storage.commits.ObjectKind`; 0 while prepared."""
    size: int
    packed: msgspec.Raw
    """Its stream ranges, packed by `tidelog.storage.commits.pack_ranges`."""
    since_ms: int
    """When it entered this state."""
    expires_ms: int
    """Cluster time (`tidelog.controller.machine.tables`) when a prepared id expires, or from which a destroyed object
    may be deleted."""
    destroyed_at: int = 0
    """Metadata version (log index) from which no metadata names a destroyed object: it stays in the bucket until every
    reader has passed it. 0: not destroyed, or by an older controller."""

    @property
    def ranges(self) -> tuple[StreamRange, ...]:
        """Unpack the stream ranges; each call creates a new tuple."""
        return _ranges.decode(self.packed)

    def release(self) -> None:
        """Copy the packed ranges out of a decoded message, so that the record does not keep the message in memory."""
        msgspec.structs.force_setattr(self, "packed", self.packed.copy())


class ClusterRecord(msgspec.Struct, frozen=True, array_like=True):
    """Table `cluster`, key: "" (one row)."""

    id: str
    """Kafka's cluster id: 22 characters of URL-safe base64 (16 bytes). Never changes."""
    active_node: int
    """Node id of the active controller."""
    active_term: int
    """Its Raft term; commands of a smaller term are refused (int64)."""
    delete_delay_ms: int
    """How long a destroyed object stays in the bucket."""
    controllers: tuple[tuple[int, str], ...] = ()
    """The quorum, `(node id, "host:port")` by id; empty for a single controller without one."""
    active_since_ms: int = 0
    """Cluster time (`tidelog.controller.machine.tables`) at which the term began; 0 at level 0."""
    level: int = 0
    """Feature level (`tidelog.controller.model.levels`); it only grows."""


ConfigRecord = dict[str, str]
"""Table `configs`, key: (kind "broker" | "cluster", name). Overrides only."""

STREAMS_PER_PARTITION = 4
"""Meta, data, time, txn; the first id is a multiple of this."""
