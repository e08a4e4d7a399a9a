"""`ReplicaSetClient`: requests about replica sets of several members (docs/design/0015-hot-tier.md).

Each is one command, sent as `ControllerClient` sends all of them: retried until its budget is used up, effective at
most once, and in the local image when it returns. All raise `UnsupportedLevel` below feature level 2, and
`OutcomeUnknown`.

Entry: `ReplicaSetClient`, as `ControllerClient.replica_sets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.commands import AnyCommand
from tidelog.controller.model.records import NO_BROKER, ReplicaSetRecord
from tidelog.controller.model.replication import PolicyRecord
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica


class SendCommand(Protocol):
    """Has a command applied once, and returns its value, of the type that is given."""

    async def __call__(self, command: AnyCommand, kind: Any, *, after_all: bool = False) -> Any:
        """`after_all`: no earlier command of this client can take effect any more when this one has an answer."""
        ...


class ReplicaSetClient:
    """Requests about replica sets; see the module docstring."""

    def __init__(self, send: SendCommand) -> None:
        self._send = send

    async def alter_sync_state_set(
        self,
        replica_set_id: int,
        wanted: SetConfiguration,
        *,
        master: tuple[int, int],
        master_epoch: int,
        ends: Mapping[WalReplica, int],
        confirm_offset: int,
        after_all: bool = False,
    ) -> ReplicaSetRecord:
        """Ask for a configuration, as the master; its `number` is that of the present one.

        `master`: broker id and registration epoch; `ends`: the WAL offset up to which each member has the master's
        bytes durably, as far as it is known. Raises `ConfigurationRefused` for a member that may not join, or a quorum
        that the policy forbids: no earlier call for the same has taken effect. Some copy of an earlier one that ended
        without an answer may still be on its way, unless `after_all`: then it is too late for it, and the request is
        known to be without effect (`Master.refused`). After `Fenced`, `StaleBrokerEpoch`, `NotEligible`, `NotFound` and
        `OutcomeUnknown` an earlier copy of it may have been accepted. `after_all` waits for the commands of this client
        that are under way, up to their budget.
        """
        members = tuple(r.ReportedMember(*each, ends.get(each, -1)) for each in sorted(wanted.members))
        command = r.AlterSyncStateSet(
            replica_set_id, *master, master_epoch, wanted.number, members, wanted.quorum, confirm_offset
        )
        found: ReplicaSetRecord = await self._send(command, ReplicaSetRecord, after_all=after_all)
        return found

    async def begin_election(
        self,
        replica_set_id: int,
        master_epoch: int,
        reason: str,
        *,
        designated: int = NO_BROKER,
        is_patient: bool = True,
    ) -> ReplicaSetRecord:
        """End a master's epoch; the members' promises elect. Raises `NotFound`, `NotEligible`, `Fenced`.

        `is_patient`: as `BeginElection` has it.
        """
        command = r.BeginElection(replica_set_id, master_epoch, reason, designated, is_patient)
        found: ReplicaSetRecord = await self._send(command, ReplicaSetRecord)
        return found

    async def promise(self, promise: r.PromiseEpoch) -> ReplicaSetRecord:
        """Tell what a replica has promised durably. The record names a master if the promise was the last one needed.

        Raises `Fenced`, `StaleBrokerEpoch`, `NotEligible` for another WAL than the one that joined, `WalLost` for one
        that ends before what it is known to have, `InvalidInput`.
        """
        found: ReplicaSetRecord = await self._send(promise, ReplicaSetRecord)
        return found

    async def elect_unclean(self, replica_set_id: int, master_epoch: int, broker_id: int) -> ReplicaSetRecord:
        """Elect a replica that may lack confirmed records, for an operator. Raises `Fenced`, `NotEligible`."""
        command = r.ElectUnclean(replica_set_id, master_epoch, broker_id)
        found: ReplicaSetRecord = await self._send(command, ReplicaSetRecord)
        return found

    async def set_policy(self, replica_set_id: int, policy: PolicyRecord, *, base: PolicyRecord | None = None) -> None:
        """Set the replication policy. `base`: the one that it was computed from, checked from feature level 6 on.

        Raises `NotFound`, `ConfigsChanged` if another one is there, `InvalidInput` for a contradiction.
        """
        await self._send(r.SetReplicaSetPolicy(replica_set_id, policy, base), None)

    async def add_replica(
        self,
        replica_set_id: int,
        broker_id: int,
        registration_epoch: int,
        wal_id: str,
        *,
        is_learner: bool = False,
        priority: int = 0,
    ) -> None:
        """Join a replica set with a WAL, as a follower. Raises `NotEligible`, `StaleBrokerEpoch`, `InvalidInput`."""
        command = r.AddReplica(replica_set_id, broker_id, registration_epoch, wal_id, is_learner, priority)
        await self._send(command, None)

    async def tell_priority(self, replica_set_id: int, broker_id: int, registration_epoch: int, priority: int) -> None:
        """Tell another election priority of a joined replica. Raises `NotEligible`, `StaleBrokerEpoch`, `NotFound`."""
        await self._send(r.TellPriority(replica_set_id, broker_id, registration_epoch, priority), None)

    async def set_priority(self, replica_set_id: int, broker_id: int, priority: int | None) -> None:
        """Set a member's election priority for an operator; None: the broker's. Raises `NotFound`, `InvalidInput`."""
        await self._send(r.SetPriority(replica_set_id, broker_id, priority), None)

    async def assign_replica(self, replica_set_id: int, broker_id: int, *, is_learner: bool = False) -> None:
        """Assign a replica to a broker, which joins by itself. Raises `NotFound`, `NotEligible`, `InvalidInput`."""
        await self._send(r.AssignReplica(replica_set_id, broker_id, is_learner), None)

    async def retire_replica(self, replica_set_id: int, broker_id: int) -> None:
        """Have a member leave, which is not the master. Raises `NotFound`, `NotEligible`."""
        await self._send(r.RetireReplica(replica_set_id, broker_id), None)

    async def remove_replica(self, replica_set_id: int, broker_id: int) -> None:
        """Remove a replica that is not in the SyncStateSet, or not joined yet. Raises `NotFound`, `NotEligible`."""
        await self._send(r.RemoveReplica(replica_set_id, broker_id), None)
