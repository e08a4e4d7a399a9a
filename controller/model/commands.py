"""The commands of the state machine: typed, small and bounded.

A command states an intention. Everything that is not in the state is part of the command or of its `Envelope`: time,
random ids, the term of the controller that proposed it. On the wire and in the journal an envelope is one msgpack
array; a command is an array whose first element is the integer tag below. Tags are never reused, and fields are only
added at the end with a default, because old journals must still load.

Bounds are constants here. Each is checked where the command is applied, because every command passes there.
"""

from __future__ import annotations

import msgspec

from tidelog.controller.model.command import Command
from tidelog.controller.model.configs import ANY
from tidelog.controller.model.errors import ErrorInfo, InvalidReplicationFactor
from tidelog.controller.model.leases import EndLease, ExpireLeases, LeaseCommand, RenewLease, TakeLease
from tidelog.controller.model.levels import (
    BEFORE_LEVELS,
    CONFIG_BASE_LEVEL,
    NEWEST,
    OLDEST,
    REPLICATION_LEVEL,
    SNAPSHOTS_LEVEL,
    LevelRange,
    UnsupportedLevel,
    require_known,
)
from tidelog.controller.model.records import NO_REPLICA_SET
from tidelog.controller.model.replica_set_commands import (
    AddReplica,
    AlterSyncStateSet,
    AssignReplica,
    BeginElection,
    ElectUnclean,
    PromiseEpoch,
    RemoveReplica,
    ReplicaSetCommand,
    RetireReplica,
    SetPriority,
    SetReplicaSetPolicy,
    TellPriority,
)
from tidelog.controller.model.snapshots import (
    CreateBranch,
    CreateSnapshot,
    DeleteSnapshot,
    SnapshotCommand,
)
from tidelog.controller.model.wal_notes import WalNote
from tidelog.storage.commits import CommitObjects as CommitRequest
from tidelog.storage.commits import CompactObjects as CompactRequest

FORMAT_VERSION = NEWEST + 1
"""Version of the envelopes of the newest feature level; see `Envelope.format_version`."""
MAX_COMMAND_BYTES = 4 << 20
"""Bound of an encoded command; a commit of 100,000 stream ranges is about 2 MB."""
MAX_PARTITIONS_PER_COMMAND = 10_000
"""They make 50,000 rows, which take about a quarter of a second to apply."""
MAX_PARTITIONS_PER_TOPIC = 100_000
PARTITIONS_PER_DELETION = 500
"""Partitions of a deleted topic that one command removes. Each has four streams with their ranges in objects, which
makes deletion several times as expensive as creation; heartbeats wait for a command (docs/protocols.md)."""
MAX_STREAMS_PER_COMMAND = 4_096
MAX_OBJECTS_PER_COMMAND = 1_024
MAX_RANGES_PER_COMMIT = 100_000
MAX_CONFIG_ENTRIES = 256
MAX_CONFIG_VALUE_CHARS = 32_768
MAX_KEY_CHARS = 256
MAX_VALUE_BYTES = 65_536
MAX_TEXT_CHARS = 1_024
"""Bound of hosts, racks, URLs and check codes."""
MAX_MOVES_PER_COMMAND = 1_024
PRODUCER_ID_BLOCK = 1_000
"""Ids in one block, as in Kafka."""


class BecomeActive(Command, frozen=True, array_like=True, tag=1):
    """First command of a term. From here on only commands that this node proposes in this term are applied."""

    node_id: int
    term: int
    cluster_id: str
    """Cluster id to use if the cluster has none yet."""
    delete_delay_ms: int


class Barrier(Command, frozen=True, array_like=True, tag=2):
    """Change nothing. Once it is applied, all earlier commands are."""


class RegisterBroker(Command, frozen=True, array_like=True, tag=3):
    """Register a broker process. Creates replica set `broker_id` if it is absent. Value: the registration epoch."""

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
    """Tells copies of a data directory apart."""
    wal_place: str = ""
    """The bucket that the broker commits to; empty: not told."""
    oldest_level: int = 0
    """The feature levels that the broker supports, both inclusive."""
    newest_level: int = -1
    """-1: not told, by a process before feature levels. The active controller proposes that at level 0 only."""


class ApplyBrokerId(Command, frozen=True, array_like=True, tag=46):
    """Allocate a broker id that was never allocated before (docs/protocols.md). Value: the id.

    Repeated with the same check code, also after the registration, it returns the same id.
    """

    check_code: str


class SetBrokerAlive(Command, frozen=True, array_like=True, tag=4):
    """Record that a session began or ended; ignored if the broker has registered again since."""

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
    """Replica set of each partition; None: see `tidelog.controller.machine.placement`."""
    loads: tuple[tuple[int, int], ...] | None = None
    """Load of each replica set in thousandths of a mean partition; added by the active controller."""
    replicas: int = 0
    """From level 2 on: the replicas that a set of its partitions must have, or get; 0: any number."""


class DeleteTopic(Command, frozen=True, array_like=True, tag=7):
    """Delete a topic, and its partitions and streams; objects that no other stream uses are destroyed.

    The topic is gone for everybody at once. Of its partitions at most `at_once` go with it; the active controller
    removes the others by `DeletePartitions`.
    """

    topic_id: bytes
    at_once: int = 0
    """Added by the active controller (`PARTITIONS_PER_DELETION`); 0, in commands of an older version: all."""


class DeletePartitions(Command, frozen=True, array_like=True, tag=74):
    """Remove up to `count` partitions of a deleted topic, those with the largest numbers first.

    Value: the number that is left.
    """

    topic_id: bytes
    count: int


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
    base: bytes = ANY
    """The digest of the overrides that the changes were computed from, from feature level 6 on; see
    `tidelog.controller.model.configs`. With others there it is refused as `ConfigsChanged`."""


class AlterConfigs(Command, frozen=True, array_like=True, tag=10):
    """Set dynamic overrides of a broker or the cluster, or configs of something that has a name; None removes one."""

    kind: str
    """`broker` or `cluster`; from feature level 4 on also `group` and `client-metrics`."""
    name: str
    changes: dict[str, str | None]
    base: bytes = ANY
    """As in `AlterTopicConfigs`."""


class AllocateProducerIds(Command, frozen=True, array_like=True, tag=11):
    """Value: `(first, count)` of a block that is never allocated again."""

    broker_id: int
    registration_epoch: int


class PutKv(Command, frozen=True, array_like=True, tag=12):
    """Write one key."""

    key: str
    value: bytes


class DeleteKv(Command, frozen=True, array_like=True, tag=13):
    """Remove one key; succeeds if it is absent."""

    key: str


class OpenStreams(Command, frozen=True, array_like=True, tag=14):
    """See `tidelog.stream.managers.StreamManager.open_streams`. Value: a list of `OpenedStream`."""

    replica_set_id: int
    master_epoch: int
    streams: tuple[tuple[int, int], ...]


class CloseStreams(Command, frozen=True, array_like=True, tag=15):
    """See `tidelog.stream.managers.StreamManager.close_streams`."""

    replica_set_id: int
    master_epoch: int
    streams: tuple[tuple[int, int], ...]


class TrimStream(Command, frozen=True, array_like=True, tag=16):
    """See `tidelog.stream.managers.StreamManager.trim_stream`."""

    stream_id: int
    epoch: int
    start_offset: int
    replica_set_id: int = NO_REPLICA_SET
    """The owner. Absent in commands of an older version: these are checked by the epoch of the stream only."""
    master_epoch: int = -1


class ReleaseStream(Command, frozen=True, array_like=True, tag=17):
    """Release a quarantined stream, on an operator's request."""

    stream_id: int


class QuarantineStream(Command, frozen=True, array_like=True, tag=23):
    """See `tidelog.storage.managers.ObjectManager.quarantine_stream`."""

    replica_set_id: int
    master_epoch: int
    stream_id: int
    reason: str


class PrepareObjects(Command, frozen=True, array_like=True, tag=18):
    """See `tidelog.storage.managers.ObjectManager.prepare_objects`. Value: the first id."""

    count: int
    ttl_ms: int


class Commit(Command, frozen=True, array_like=True, tag=19):
    """See `tidelog.storage.commits.CommitObjects`."""

    request: CommitRequest


class ExpireObjects(Command, frozen=True, array_like=True, tag=20):
    """Destroy prepared ids that have expired; other ids in the list are ignored."""

    object_ids: tuple[int, ...]


class ForgetObjects(Command, frozen=True, array_like=True, tag=21):
    """Remove destroyed objects that were deleted from the bucket; other ids in the list are ignored."""

    object_ids: tuple[int, ...]


class Compact(Command, frozen=True, array_like=True, tag=22):
    """See `tidelog.storage.commits.CompactObjects`."""

    request: CompactRequest


class PartitionMove(msgspec.Struct, frozen=True, array_like=True):
    """A new placement of one partition."""

    topic_id: bytes
    index: int
    replica_set: int
    """The target; -1 cancels the move in progress."""


class ClosedPartition(msgspec.Struct, frozen=True, array_like=True):
    """A partition whose log was closed by its owner, with everything in the bucket."""

    topic_id: bytes
    index: int
    epoch: int
    """Epoch of its four streams: the leader epoch they were opened with."""
    end_offsets: tuple[int, int, int, int]
    """End offsets of its streams at the owner: the hand-over is refused unless everything below them is committed."""
    meta_start: int = 0
    """Offset at which a complete rewrite of the meta stream begins; it need not be read below this offset."""
    ready_replica_set: int = NO_REPLICA_SET
    """The target that has just reported that it can serve the partition immediately; -1: none."""
    ready_master_epoch: int = -1
    """The target's master epoch in that report. If it is still current, the hand-over opens the streams for the
    target."""


class MovePartitions(Command, frozen=True, array_like=True, tag=40):
    """Commit new placements without electing anything. Value: an error or nil for each, in order."""

    moves: tuple[PartitionMove, ...]


class HandOver(Command, frozen=True, array_like=True, tag=41):
    """Close the streams of moving partitions on the owner's request, and elect the targets. Value: as for tag 40.

    For a target that is ready the streams are opened in the same step, without a request of its own.
    """

    replica_set_id: int
    master_epoch: int
    partitions: tuple[ClosedPartition, ...]


class ElectPartitions(Command, frozen=True, array_like=True, tag=42):
    """Elect the targets of moving partitions whose streams are closed. Value: as for tag 40."""

    partitions: tuple[tuple[bytes, int], ...]


class ReclaimPartitions(Command, frozen=True, array_like=True, tag=43):
    """Let the owner continue under a new leader epoch, which voids a hand-over in flight. Value: as for tag 40."""

    replica_set_id: int
    master_epoch: int
    partitions: tuple[tuple[bytes, int], ...]


class DrainBroker(Command, frozen=True, array_like=True, tag=44):
    """Start or end the drain of a broker. The active controller plans the moves."""

    broker_id: int
    mode: int
    """A `tidelog.controller.model.records.DrainMode`. SHUTDOWN is set by the broker itself and does not replace
    OPERATOR."""
    registration_epoch: int = -1
    """For SHUTDOWN: the registration of the process that is stopping."""


class BeginRestart(Command, frozen=True, array_like=True, tag=47):
    """Begin the drain of a broker whose process ends, to be started again, if the cluster can do without it now.

    The drain is that of SHUTDOWN: it ends when a new process registers. Refused as `RestartRefused` while anything
    speaks against it (`tidelog.controller.model.restart`). The same again, while it drains, changes nothing.
    """

    broker_id: int
    registration_epoch: int
    """The registration of the process that shall end."""


class RemoveBroker(Command, frozen=True, array_like=True, tag=45):
    """Remove a broker that owns nothing, and its replica set."""

    broker_id: int


class ElectSuccessor(Command, frozen=True, array_like=True, tag=70):
    """Appoint the broker that takes over the replica set of a dead master, under the next master epoch.

    Value: the `ReplicaSetRecord`. See docs/design/0007-failover.md.
    """

    replica_set_id: int
    broker_id: int
    """The successor."""
    master_epoch: int
    """The current epoch, which ends; refused if it has already ended."""


class PlaceTakenOver(Command, frozen=True, array_like=True, tag=71):
    """Place the partitions of a replica set whose WAL is completely committed.

    Value: the number of partitions that it still has. At zero the takeover is over.
    """

    replica_set_id: int
    master_epoch: int
    wal_offset: int
    """End of the recovered WAL; refused if the committed WAL offset is below it."""
    partitions: tuple[tuple[bytes, int], ...]
    """At most 1,024; partitions of other replica sets and deleted ones are skipped."""


class Abandon(Command, frozen=True, array_like=True, tag=72):
    """Abandon the records that exist only in a dead broker's WAL, on an operator's request, and place its partitions.

    Value: `(partitions it still has, the next master epoch)`. Refused for a broker whose WAL is in the bucket, because
    other brokers can recover it, unless `force` is set.
    """

    replica_set_id: int
    master_epoch: int
    """The current epoch, which ends; refused if it has already ended."""
    partitions: tuple[tuple[bytes, int], ...]
    """At most 1,024; partitions of other replica sets and deleted ones are skipped."""
    force: bool = False


class NoteWal(Command, frozen=True, array_like=True, tag=73):
    """Note what a master knows of its WAL. A note that is older than the known one changes nothing."""

    replica_set_id: int
    note: WalNote
    """Its master epoch must be the current one."""


class AcceptWalLoss(Command, frozen=True, array_like=True, tag=75):
    """Give up what only a lost WAL had, on an operator's request, and record that.

    Sent by the broker that was refused with the WAL it found, as the current master.
    """

    replica_set_id: int
    master_epoch: int
    lost_epoch: int
    """The master epoch of the note that the operator saw: the acceptance of one loss is not that of a later one."""


class SetLevel(Command, frozen=True, array_like=True, tag=60):
    """Raise the feature level of the cluster (docs/design/0013-feature-levels.md). Value: the level.

    Refused unless every registered broker and every published controller supports it. Repeated, it changes nothing. A
    level is never lowered. Processes before feature levels do not know this command, and end when they read it.
    """

    level: int
    elapsed_ms: int
    """Time since the proposer's term began, by its monotonic clock: from here on that moves the cluster time."""
    controllers: tuple[tuple[int, int, int], ...]
    """What each controller says that it supports: `(node id, oldest, newest)`."""


class SetControllers(Command, frozen=True, array_like=True, tag=50):
    """Publish the members of the quorum, for brokers to find them."""

    controllers: tuple[tuple[int, str], ...]


AnyCommand = (
    BecomeActive
    | Barrier
    | RegisterBroker
    | SetBrokerAlive
    | Elect
    | CreateTopic
    | DeleteTopic
    | DeletePartitions
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
    | BeginRestart
    | RemoveBroker
    | ElectSuccessor
    | PlaceTakenOver
    | Abandon
    | NoteWal
    | AcceptWalLoss
    | SetLevel
    | SetControllers
    | ReplicaSetCommand
    | LeaseCommand
    | SnapshotCommand
)

INTERNAL: frozenset[type] = frozenset(
    {BecomeActive, SetBrokerAlive, ExpireObjects, ForgetObjects, SetControllers, DeletePartitions, SetLevel}
    | {ExpireLeases}
)
"""Commands that only the active controller proposes; refused from a client."""

FIRST_LEVEL: dict[type, int] = {
    **dict.fromkeys((NoteWal, DeletePartitions, AcceptWalLoss), 1),
    **dict.fromkeys((AlterSyncStateSet, BeginElection, PromiseEpoch, SetReplicaSetPolicy), 2),
    **dict.fromkeys((AddReplica, RemoveReplica, ElectUnclean, AssignReplica, RetireReplica), 2),
    **dict.fromkeys((TellPriority, SetPriority), 2),
    BeginRestart: 2,
    **dict.fromkeys((TakeLease, RenewLease, EndLease, ExpireLeases), 3),
    **dict.fromkeys((CreateSnapshot, DeleteSnapshot, CreateBranch), SNAPSHOTS_LEVEL),
}
"""The feature level that a command came with; the others are of level 0, and `SetLevel` itself is of any."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A command with all inputs of its application."""

    format_version: int
    """The feature level that it was written at, plus one."""
    term: int
    """Raft term of the active controller that proposed it."""
    now_ms: int
    """Wall clock of the proposer: for times that users see. No decision is made by it."""
    client_id: str
    """Id of the client; empty for the controller itself, which needs no dedupe."""
    sequence: int
    """The client's number for this command, from 1."""
    done: int
    """The client has the results of all sequences below this."""
    command: AnyCommand
    elapsed_ms: int = -1
    """Time since the proposer's term began, by its monotonic clock; -1 at level 0, where its wall clock counts."""

    @property
    def level(self) -> int:
        """Return the feature level by whose rules the command is applied.

        Builds between level 0 and the first with levels wrote version 1 and told what elapsed: they were at level 1.
        """
        return max(self.format_version - 1, 1 if self.elapsed_ms >= 0 else 0)


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a command."""

    version: int
    """Metadata version from which the command's effects are visible."""
    value: msgspec.Raw
    """The value that the command's class documents, as msgpack, or nil."""
    error: ErrorInfo | None


class _EnvelopeVersion(msgspec.Struct, frozen=True, array_like=True):
    """What every version of an envelope begins with."""

    format_version: int


_encoder = msgspec.msgpack.Encoder()
_leading = msgspec.msgpack.Decoder(_EnvelopeVersion)
_envelopes = msgspec.msgpack.Decoder(Envelope)
_commands: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_results = msgspec.msgpack.Decoder(Result)


def encode(value: Envelope | Command | Result) -> bytes:
    """Encode as one msgpack value."""
    return _encoder.encode(value)


def require_level(command: Command, level: int) -> None:
    """Check that a command exists at a feature level. Raises `UnsupportedLevel`."""
    first = FIRST_LEVEL.get(type(command), OLDEST)
    if first > level:
        raise UnsupportedLevel(
            f"{type(command).__name__} needs feature level {first}; the cluster is at level {level}",
            hint="when every member is upgraded, `tidelog cluster upgrade` raises the level",
        )


def levels_of(registration: RegisterBroker) -> LevelRange:
    """Return the feature levels that a broker says that it supports."""
    if registration.newest_level < 0:
        return BEFORE_LEVELS
    return LevelRange(registration.oldest_level, registration.newest_level)


def require_member(registration: RegisterBroker, level: int) -> None:
    """Check that a broker supports a feature level. Raises `UnsupportedLevel`."""
    supported = levels_of(registration)
    if level not in supported:
        raise UnsupportedLevel(
            f"the cluster is at feature level {level}; broker {registration.broker_id} supports {supported}",
            hint="start this broker in a version that supports the level; a level is never lowered",
        )


def at_level(command: AnyCommand, level: int) -> AnyCommand:
    """Return a command as it is written at a feature level, without fields that came later.

    Raises `UnsupportedLevel` for a command that came later, `InvalidReplicationFactor`.
    """
    require_level(command, level)
    if level < REPLICATION_LEVEL and isinstance(command, CreateTopic):
        if command.replicas > 1:
            raise InvalidReplicationFactor(
                f"replication factor {command.replicas}: at feature level {level} a replica set has one member",
                hint="`tidelog cluster upgrade` raises the level",
            )
        return msgspec.structs.replace(command, replicas=0)
    if level < CONFIG_BASE_LEVEL and isinstance(command, AlterTopicConfigs | AlterConfigs):
        return msgspec.structs.replace(command, base=ANY)
    if level < CONFIG_BASE_LEVEL and isinstance(command, SetReplicaSetPolicy):
        return msgspec.structs.replace(command, base=None)
    if level >= 1:
        return command
    if isinstance(command, RegisterBroker):
        return msgspec.structs.replace(command, wal_place="", oldest_level=0, newest_level=-1)
    if isinstance(command, DeleteTopic):
        return msgspec.structs.replace(command, at_once=0)
    if isinstance(command, TrimStream):
        return msgspec.structs.replace(command, replica_set_id=NO_REPLICA_SET, master_epoch=-1)
    return command


def encode_envelope(envelope: Envelope, level: int) -> bytes:
    """Encode an envelope for a cluster at a feature level. Raises `UnsupportedLevel`, as `at_level`."""
    return _encoder.encode(
        msgspec.structs.replace(
            envelope,
            format_version=level + 1,
            command=at_level(envelope.command, level),
            elapsed_ms=envelope.elapsed_ms if level >= 1 else -1,
        )
    )


def decode_envelope(data: bytes) -> Envelope:
    """Decode an envelope. Raises `NewerLevel` for one of an unknown version, `msgspec.DecodeError` for other data."""
    try:
        envelope = _envelopes.decode(data)
    except msgspec.DecodeError:
        require_known(_leading.decode(data).format_version - 1, "a command")
        raise
    require_known(envelope.format_version - 1, f"the command {type(envelope.command).__name__}")
    return envelope


def decode_command(data: bytes | msgspec.Raw) -> AnyCommand:
    """Decode a command. Raises `msgspec.DecodeError`."""
    return _commands.decode(data)


def decode_result(data: bytes | msgspec.Raw) -> Result:
    """Decode a result. Raises `msgspec.DecodeError`."""
    return _results.decode(data)
