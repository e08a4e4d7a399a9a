"""The records that the controller keeps, as they are in the state, in images and on the wire (msgpack arrays).

Everything here is plain data. A record is immutable: a command replaces it. None is part of a cycle, so the garbage
collector need not know the many small ones (`gc=False`). Tables are dictionaries keyed as noted; a delta is a list of
`(table, key, record or None)`. Fields may be added at the end with a default, never removed or reordered: old snapshots
and journals must still load.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from storage.managers import StreamRange, pack_ranges
from stream.managers import OpenedStream

NO_BROKER = -1
NO_REPLICA_SET = -1


NO_RANGES = pack_ranges(())
_ranges: msgspec.msgpack.Decoder[tuple[StreamRange, ...]] = msgspec.msgpack.Decoder(tuple[StreamRange, ...])


class StreamState(IntEnum):
    """Whether a stream has an owner that may append."""

    CLOSED = 0
    OPENED = 1


class ObjectState(IntEnum):
    """The life of an object in the metadata."""

    PREPARED = 0
    """An id was given out; nothing may name it yet."""
    COMMITTED = 1
    DESTROYED = 2
    """Nothing names it any more; it is deleted from the bucket after the delay, then forgotten."""


class DrainMode(IntEnum):
    """Whether a broker gives its partitions away, and takes no new ones."""

    NONE = 0
    SHUTDOWN = 1
    """Its process is going to stop; over when it registers anew."""
    OPERATOR = 2
    """Until an operator says otherwise."""


class BrokerRecord(msgspec.Struct, frozen=True, array_like=True):
    """Table `brokers`, key: broker id (int32)."""

    id: int
    check_code: str
    """Drawn by the broker with its identity; tells two directories with one id apart."""
    host: str
    """Kafka host that clients connect to."""
    port: int
    rack: str
    admin_url: str
    incarnation: str
    """Drawn at each process start; a larger registration replaces it."""
    registration_epoch: int
    """Grows with each registration (int64)."""
    alive: bool
    draining: int = DrainMode.NONE
    """A `DrainMode`."""
    wal_kind: str = ""
    """Where it keeps its WAL: `disk`, `s3` or `memory`; empty: an older broker that does not say."""
    peer_address: str = ""
    """`host:port` where it listens to other brokers; empty: it does not."""
    directory: str = ""
    """Which directory on which machine it runs over: a copy of it has another one. Empty: it does not say."""


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
    """What committed objects cover of its WAL (int64 bytes)."""
    salvager: int = NO_BROKER
    """The broker that brings what a dead master left into the bucket, or -1; then there is no master."""
    salvage_since_ms: int = 0
    """When that began."""


class TopicRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `topics`, key: topic id (16 bytes)."""

    id: bytes
    name: str
    partitions: int
    configs: dict[str, str]
    """Overrides only, by Kafka's names."""
    internal: bool
    created_ms: int


class PartitionRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `partitions`, key: (topic id, index).

    Leader = master of the replica set. Leader epoch = `epoch_base` + that replica set's master epoch, so an election
    touches no partition record; a move chooses `epoch_base` so that the leader epoch grows. While a partition moves,
    `replica_set` is the one that still owns it and `target` the placement that was committed last
    (docs/design/0006-partition-moves.md).
    """

    topic_id: bytes
    index: int
    replica_set: int
    epoch_base: int
    first_stream: int
    """Stream ids: meta = first_stream, data = +1, time = +2, txn = +3."""
    target: int = NO_REPLICA_SET
    """The replica set it is moving to, or -1."""
    moving_since_ms: int = 0
    """When that placement was committed."""


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
    """Why the stream takes no commits, or empty."""
    released_at: int = -1
    """The committed end when a quarantine was lifted last; -1: never."""

    def as_opened(self) -> OpenedStream:
        """What its opener needs of it."""
        return OpenedStream(
            self.id, self.epoch, self.start_offset, self.end_offset, self.owner_since_epoch, self.released_at
        )

    def ending_at(self, end_offset: int) -> StreamRecord:
        """The row after a commit up to `end_offset`; `msgspec.structs.replace` would take three times as long."""
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
    """A `storage.managers.ObjectKind`; 0 while prepared."""
    size: int
    packed: msgspec.Raw
    """Its stream ranges, by `storage.managers.pack_ranges`."""
    since_ms: int
    """When it entered this state."""
    expires_ms: int
    """When a prepared id is given up, or a destroyed object may be deleted."""

    @property
    def ranges(self) -> tuple[StreamRange, ...]:
        """What is packed, made anew each time."""
        return _ranges.decode(self.packed)

    def release(self) -> None:
        """For a record that was just decoded: no longer keep the whole message alive for the ranges in it."""
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


ConfigRecord = dict[str, str]
"""Table `configs`, key: (kind "broker" | "cluster", name). Overrides only."""

STREAMS_PER_PARTITION = 4
"""Meta, data, time, txn; the first id is a multiple of this."""
