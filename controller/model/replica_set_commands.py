"""The commands about replica sets of several members (docs/design/0015-hot-tier.md), from feature level 2 on.

What holds for all commands is in `tidelog.controller.model.commands`, which lists these, too. All of them are bounded
by `MAX_REPLICAS` and `MAX_WAL_ID_CHARS`.
"""

from __future__ import annotations

import msgspec

from tidelog.controller.model.command import Command
from tidelog.controller.model.records import NO_BROKER
from tidelog.controller.model.replication import PolicyRecord

MAX_WAL_ID_CHARS = 64
"""A WAL's id is a random number as text."""
MAX_REASON_CHARS = 200
"""Characters kept of the reason of an election."""


class ReportedMember(msgspec.Struct, frozen=True, array_like=True):
    """A member of the SyncStateSet that a master asks for."""

    broker_id: int
    wal_id: str
    end_offset: int = -1
    """WAL offset up to which it has the master's bytes durably; -1: the master does not know."""


class AlterSyncStateSet(Command, frozen=True, array_like=True, tag=80):
    """Change SyncStateSet and write quorum, on the master's request. Value: the `ReplicaSetRecord`.

    Refused unless both epochs are current and the caller is the master under its current registration. The same request
    again, with the epochs that it had first, succeeds and changes nothing. After `ConfigurationRefused`, and after no
    other error, no copy of the request has taken effect before.
    """

    replica_set_id: int
    broker_id: int
    """The master."""
    registration_epoch: int
    master_epoch: int
    sync_state_set_epoch: int
    """The one that is replaced; the new one is larger by one."""
    members: tuple[ReportedMember, ...]
    """The master included."""
    quorum: int
    confirm_offset: int = -1
    """The master's confirm offset; -1: not told."""


class BeginElection(Command, frozen=True, array_like=True, tag=81):
    """End the master's epoch and begin an election under the next one. Value: the `ReplicaSetRecord`.

    A second command with the same epoch finds the election under way, and changes nothing.
    """

    replica_set_id: int
    master_epoch: int
    """The current epoch, which ends."""
    reason: str
    designated: int = NO_BROKER
    """The broker to elect if the promises that are not ahead of its own are enough; its promise is awaited while it is
    alive, and those of others that may help."""
    is_patient: bool = True
    """Whether the promise of a living master is awaited."""


class PromiseEpoch(Command, frozen=True, array_like=True, tag=82):
    """Count a replica's promise, and elect if it was the last that was needed. Value: the `ReplicaSetRecord`.

    The replica has promised durably that its WAL takes nothing from a master of an older epoch.
    """

    replica_set_id: int
    master_epoch: int
    """The epoch of the election."""
    broker_id: int
    registration_epoch: int
    wal_id: str
    last_epoch: int
    """Master epoch of the last byte of its WAL; -1: the WAL is empty."""
    end_offset: int
    """WAL offset at which it ends, durably."""
    confirm_offset: int
    """WAL offset up to which it knows that its bytes are confirmed."""


class SetReplicaSetPolicy(Command, frozen=True, array_like=True, tag=83):
    """Set the replication policy of a replica set. The master asks for the configuration that follows."""

    replica_set_id: int
    policy: PolicyRecord
    base: PolicyRecord | None = None
    """The one that it was computed from; from feature level 6 on. With another one there it is refused as
    `ConfigsChanged`; None: it replaces any."""


class AddReplica(Command, frozen=True, array_like=True, tag=84):
    """Let a broker join a replica set with its WAL, as a follower outside the SyncStateSet. It must be assigned, unless
    it is the home broker; below `EMPTY_COPY_LEVEL` it is assigned then.

    The master of a set of one member tells its own WAL first, and is in the SyncStateSet with it. A broker that has
    another WAL than before joins anew; the one before stays in the SyncStateSet until the master asks for another.
    """

    replica_set_id: int
    broker_id: int
    registration_epoch: int
    wal_id: str
    is_learner: bool = False
    priority: int = 0
    """`replication.election_priority` of the broker, int32."""


class RemoveReplica(Command, frozen=True, array_like=True, tag=85):
    """Remove a replica that is not in the SyncStateSet, nor the home broker's, and its assignment.

    Succeeds if there is neither.
    """

    replica_set_id: int
    broker_id: int


class ElectUnclean(Command, frozen=True, array_like=True, tag=86):
    """Elect a replica that may lack confirmed records, on an operator's request. Value: the `ReplicaSetRecord`.

    For an election that cannot end otherwise. The replica has promised the epoch; it goes on alone, and the loss is
    recorded as that of a lost WAL is.
    """

    replica_set_id: int
    master_epoch: int
    """The epoch of the election."""
    broker_id: int


class AssignReplica(Command, frozen=True, array_like=True, tag=87):
    """Assign a replica of a set to a broker, which joins by itself then. A second time changes nothing.

    A broker that was to leave stays. A learner that is assigned as a member becomes one, with the WAL that it has; a
    member does not become a learner. A newcomer that is assigned again stays, and so does the one that it was to
    replace.
    """

    replica_set_id: int
    broker_id: int
    is_learner: bool = False
    """It receives everything, and is never counted or elected."""
    instead_of: int = NO_BROKER
    """The member that leaves when this one is in sync; -1: none. The active controller's, to even replicas out."""


class RetireReplica(Command, frozen=True, array_like=True, tag=88):
    """Have a member leave the SyncStateSet, not the master or the home broker; the active controller removes it."""

    replica_set_id: int
    broker_id: int


class TellPriority(Command, frozen=True, array_like=True, tag=89):
    """Note the election priority with which a broker is configured now. It joined with another one.

    Refused unless it has joined: unlike `AddReplica` it lets no broker join that was removed meanwhile.
    """

    replica_set_id: int
    broker_id: int
    registration_epoch: int
    priority: int
    """int32."""


class SetPriority(Command, frozen=True, array_like=True, tag=90):
    """Set a member's election priority in one set, on an operator's request, or take that back.

    It counts instead of what the broker is configured with, until the replica is removed.
    """

    replica_set_id: int
    broker_id: int
    priority: int | None
    """int32; None: what the broker is configured with counts again."""


ReplicaSetCommand = (
    AlterSyncStateSet
    | BeginElection
    | PromiseEpoch
    | SetReplicaSetPolicy
    | AddReplica
    | RemoveReplica
    | ElectUnclean
    | AssignReplica
    | RetireReplica
    | TellPriority
    | SetPriority
)
