"""The commands of the state machine: typed, small and bounded.

A command is an intention; everything that is not in the state rides in it or in its `Envelope`: time, random ids, the
term of the controller that proposed it. On the wire and in the journal an envelope is one msgpack array; a command is
an array whose first element is the integer tag below. Tags are never reused, fields are only added at the end with a
default: old journals must still load.

Bounds are constants here, each checked where the command is applied (the only place that nobody can get around).
"""

from __future__ import annotations

import msgspec

from controller.errors import ErrorInfo
from controller.model import NO_REPLICA_SET
from storage.managers import CommitObjects as CommitRequest
from storage.managers import CompactObjects as CompactRequest

FORMAT_VERSION = 1
MAX_COMMAND_BYTES = 4 << 20
"""An encoded command; a commit of 100,000 stream ranges is about 2 MB."""
MAX_PARTITIONS_PER_COMMAND = 10_000
"""Makes 50,000 rows, about a quarter of a second of apply."""
MAX_PARTITIONS_PER_TOPIC = 100_000
MAX_STREAMS_PER_COMMAND = 4_096
MAX_OBJECTS_PER_COMMAND = 1_024
MAX_RANGES_PER_COMMIT = 100_000
MAX_CONFIG_ENTRIES = 256
MAX_CONFIG_VALUE_CHARS = 32_768
MAX_KEY_CHARS = 256
MAX_VALUE_BYTES = 65_536
MAX_TEXT_CHARS = 1_024
"""Hosts, racks, URLs, check codes."""
MAX_MOVES_PER_COMMAND = 1_024
PRODUCER_ID_BLOCK = 1_000
"""Ids in one block, as Kafka."""


class Command(msgspec.Struct, frozen=True, array_like=True):
    """The base of all commands."""


class BecomeActive(Command, frozen=True, array_like=True, tag=1):
    """First command of a term: from here on only this node's commands of this term count."""

    node_id: int
    term: int
    cluster_id: str
    """Taken if the cluster has no id yet."""
    delete_delay_ms: int


class Barrier(Command, frozen=True, array_like=True, tag=2):
    """Changes nothing; when it is applied, everything before it is."""


class RegisterBroker(Command, frozen=True, array_like=True, tag=3):
    """A broker process starts. Creates replica set `broker_id` if there is none. Value: the registration epoch."""

    broker_id: int
    check_code: str
    incarnation: str
    host: str
    port: int
    rack: str
    admin_url: str
    wal_kind: str = ""
    peer_address: str = ""
    directory: str = ""


class ApplyBrokerId(Command, frozen=True, array_like=True, tag=46):
    """A broker without an id asks for one that was never given out (hot-tier.md C2). Value: the id.

    Asked again with the same check code, also after its registration, it gets the same one.
    """

    check_code: str


class SetBrokerAlive(Command, frozen=True, array_like=True, tag=4):
    """A session began or ended; ignored if the broker registered again since."""

    broker_id: int
    registration_epoch: int
    alive: bool


class Elect(Command, frozen=True, array_like=True, tag=5):
    """Make the broker master of the replica set, with the next master epoch. Value: the `ReplicaSetRecord`."""

    replica_set_id: int
    broker_id: int


class CreateTopic(Command, frozen=True, array_like=True, tag=6):
    """Value: the `TopicRecord`."""

    topic_id: bytes
    """16 random bytes."""
    name: str
    partitions: int
    configs: dict[str, str]
    internal: bool
    validate_only: bool
    assignment: tuple[int, ...] | None
    """Replica set of each partition; None: see `controller.placement`."""
    loads: tuple[tuple[int, int], ...] | None = None
    """What each replica set carries, in thousandths of a mean partition; the active controller adds it."""


class DeleteTopic(Command, frozen=True, array_like=True, tag=7):
    """Deletes partitions and streams; objects nobody else uses are destroyed."""

    topic_id: bytes


class CreatePartitions(Command, frozen=True, array_like=True, tag=8):
    """Grow a topic to `total` partitions. Value: the `TopicRecord`."""

    topic_id: bytes
    total: int
    assignment: tuple[int, ...] | None = None
    """Replica set of each new partition."""
    validate_only: bool = False
    loads: tuple[tuple[int, int], ...] | None = None
    """As in `CreateTopic`."""


class AlterTopicConfigs(Command, frozen=True, array_like=True, tag=9):
    """Set overrides; None removes one."""

    topic_id: bytes
    changes: dict[str, str | None]


class AlterConfigs(Command, frozen=True, array_like=True, tag=10):
    """Set dynamic overrides of a broker or the cluster; None removes one."""

    kind: str
    """`broker` or `cluster`."""
    name: str
    changes: dict[str, str | None]


class AllocateProducerIds(Command, frozen=True, array_like=True, tag=11):
    """Value: `(first, count)` of a block nobody else gets."""

    broker_id: int
    registration_epoch: int


class PutKv(Command, frozen=True, array_like=True, tag=12):
    """Write one key."""

    key: str
    value: bytes


class DeleteKv(Command, frozen=True, array_like=True, tag=13):
    """Remove one key; an absent one is success."""

    key: str


class OpenStreams(Command, frozen=True, array_like=True, tag=14):
    """See `stream.managers.StreamManager.open_streams`. Value: a list of `OpenedStream`."""

    replica_set_id: int
    master_epoch: int
    streams: tuple[tuple[int, int], ...]


class CloseStreams(Command, frozen=True, array_like=True, tag=15):
    """See `stream.managers.StreamManager.close_streams`."""

    replica_set_id: int
    master_epoch: int
    streams: tuple[tuple[int, int], ...]


class TrimStream(Command, frozen=True, array_like=True, tag=16):
    """See `stream.managers.StreamManager.trim_stream`."""

    stream_id: int
    epoch: int
    start_offset: int


class ReleaseStream(Command, frozen=True, array_like=True, tag=17):
    """An operator lifts a stream's quarantine."""

    stream_id: int


class QuarantineStream(Command, frozen=True, array_like=True, tag=23):
    """See `storage.managers.ObjectManager.quarantine_stream`."""

    replica_set_id: int
    master_epoch: int
    stream_id: int
    reason: str


class PrepareObjects(Command, frozen=True, array_like=True, tag=18):
    """See `storage.managers.ObjectManager.prepare_objects`. Value: the first id."""

    count: int
    ttl_ms: int


class Commit(Command, frozen=True, array_like=True, tag=19):
    """See `storage.managers.CommitObjects`."""

    request: CommitRequest


class ExpireObjects(Command, frozen=True, array_like=True, tag=20):
    """Give up prepared ids whose time is over; others in the list are left alone."""

    object_ids: tuple[int, ...]


class ForgetObjects(Command, frozen=True, array_like=True, tag=21):
    """Destroyed objects that were deleted from the bucket leave the metadata; others in the list are left alone."""

    object_ids: tuple[int, ...]


class Compact(Command, frozen=True, array_like=True, tag=22):
    """See `storage.managers.CompactObjects`."""

    request: CompactRequest


class PartitionMove(msgspec.Struct, frozen=True, array_like=True):
    """A new placement of one partition."""

    topic_id: bytes
    index: int
    replica_set: int
    """Where it shall be; -1 cancels the move that goes on."""


class ClosedPartition(msgspec.Struct, frozen=True, array_like=True):
    """A partition whose log is closed by its owner, everything in the bucket."""

    topic_id: bytes
    index: int
    epoch: int
    """Of its four streams: the leader epoch it was opened with."""
    end_offsets: tuple[int, int, int, int]
    """Where its streams end at the owner: the controller takes the hand-over only if all of that is committed."""
    meta_start: int = 0
    """The meta stream need not be read before this offset: a whole rewrite of it begins here."""
    ready_replica_set: int = NO_REPLICA_SET
    """The target that said, a moment ago, that it serves the partition as soon as it has it; -1: none did."""
    ready_master_epoch: int = -1
    """In which master epoch it said so. If that is the target's still, the hand-over opens the streams for it."""


class MovePartitions(Command, frozen=True, array_like=True, tag=40):
    """Commit new placements; nothing is elected yet. Value: an error or nil for each, in order."""

    moves: tuple[PartitionMove, ...]


class HandOver(Command, frozen=True, array_like=True, tag=41):
    """The owner closes the streams of partitions that move, and their targets are elected. Value: as 40.

    A target that is ready has its streams opened in the same step, and need not ask.
    """

    replica_set_id: int
    master_epoch: int
    partitions: tuple[ClosedPartition, ...]


class ElectPartitions(Command, frozen=True, array_like=True, tag=42):
    """Elect the targets of partitions that move and whose streams are closed. Value: as 40."""

    partitions: tuple[tuple[bytes, int], ...]


class ReclaimPartitions(Command, frozen=True, array_like=True, tag=43):
    """Their owner goes on under a new leader epoch: a hand-over that may still be on its way is void. Value: as 40."""

    replica_set_id: int
    master_epoch: int
    partitions: tuple[tuple[bytes, int], ...]


class DrainBroker(Command, frozen=True, array_like=True, tag=44):
    """Have a broker give its partitions away, or stop that. The active controller plans the moves."""

    broker_id: int
    mode: int
    """A `controller.model.DrainMode`. SHUTDOWN is for the broker itself and does not replace OPERATOR."""
    registration_epoch: int = -1
    """For SHUTDOWN: the registration that is about to stop."""


class RemoveBroker(Command, frozen=True, array_like=True, tag=45):
    """Forget a broker that owns nothing any more, and its replica set."""

    broker_id: int


class Salvage(Command, frozen=True, array_like=True, tag=70):
    """A dead master's replica set is salvaged by another broker, under the next master epoch.

    Value: the `ReplicaSetRecord`. See docs/design/0007-failover.md.
    """

    replica_set_id: int
    broker_id: int
    """The salvager."""
    master_epoch: int
    """The epoch that ends; refused if it has ended already."""


class PlaceSalvaged(Command, frozen=True, array_like=True, tag=71):
    """All that a replica set's WAL held is committed: its partitions get new owners.

    Value: how many partitions it still has. With none left the salvage is over.
    """

    replica_set_id: int
    master_epoch: int
    wal_offset: int
    """Where the recovered WAL ends: refused while less is committed."""
    partitions: tuple[tuple[bytes, int], ...]
    """At most 1,024; others' partitions and deleted ones are passed over."""


class Abandon(Command, frozen=True, array_like=True, tag=72):
    """An operator gives up what only a dead broker's WAL has: its partitions get new owners, as far as the bucket goes.

    Value: `(partitions it still has, the next master epoch)`. Not one of a broker whose WAL is in the bucket, which
    others can recover, unless `force` says that this cannot be done.
    """

    replica_set_id: int
    master_epoch: int
    """The epoch that ends; refused if it has ended already."""
    partitions: tuple[tuple[bytes, int], ...]
    """At most 1,024; others' partitions and deleted ones are passed over."""
    force: bool = False


class SetControllers(Command, frozen=True, array_like=True, tag=50):
    """Who the members of the quorum are, for brokers to find them."""

    controllers: tuple[tuple[int, str], ...]


AnyCommand = (
    BecomeActive
    | Barrier
    | RegisterBroker
    | SetBrokerAlive
    | Elect
    | CreateTopic
    | DeleteTopic
    | CreatePartitions
    | AlterTopicConfigs
    | AlterConfigs
    | AllocateProducerIds
    | ApplyBrokerId
    | PutKv
    | DeleteKv
    | OpenStreams
    | CloseStreams
    | TrimStream
    | QuarantineStream
    | ReleaseStream
    | PrepareObjects
    | Commit
    | ExpireObjects
    | ForgetObjects
    | Compact
    | MovePartitions
    | HandOver
    | ElectPartitions
    | ReclaimPartitions
    | DrainBroker
    | RemoveBroker
    | Salvage
    | PlaceSalvaged
    | Abandon
    | SetControllers
)

INTERNAL: frozenset[type] = frozenset({BecomeActive, SetBrokerAlive, ExpireObjects, ForgetObjects, SetControllers})
"""What only the active controller itself proposes; refused from a client."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A command with all that its application may depend on."""

    format_version: int
    term: int
    """Raft term of the active controller that proposed it."""
    now_ms: int
    """Its clock; the state keeps the maximum."""
    client_id: str
    """Who asked; empty for the controller itself, which needs no dedupe."""
    sequence: int
    """The client's number for this command, from 1."""
    done: int
    """The client has the answers of all sequences below this."""
    command: AnyCommand


class Result(msgspec.Struct, frozen=True, array_like=True):
    """What a command came to."""

    version: int
    """A copy of the metadata at this version contains the command's effects."""
    value: msgspec.Raw
    """msgpack of the value the command's class names, or nil."""
    error: ErrorInfo | None


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_commands: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_results = msgspec.msgpack.Decoder(Result)


def encode(value: Envelope | Command | Result) -> bytes:
    """One msgpack value."""
    return _encoder.encode(value)


def decode_envelope(data: bytes) -> Envelope:
    """Raises `msgspec.DecodeError` (a newer member's command, or not an envelope)."""
    return _envelopes.decode(data)


def decode_command(data: bytes | msgspec.Raw) -> AnyCommand:
    """Raises `msgspec.DecodeError`."""
    return _commands.decode(data)


def decode_result(data: bytes | msgspec.Raw) -> Result:
    """Raises `msgspec.DecodeError`."""
    return _results.decode(data)
