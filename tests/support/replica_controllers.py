"""The controllers' state machine with one replica set of several brokers, without Raft: commands are applied in the
order in which they arrive. Entry: `Controllers`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec

from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import from_wire
from tidelog.controller.model.replication import PolicyRecord
from tidelog.storage.commits import CommitObjects
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.policy import ReplicationPolicy


class Violation(AssertionError):
    """The oracle's finding."""


@dataclass(frozen=True)
class State:
    """The replica set in the controllers' state, as brokers see it in their images."""

    version: int
    configuration: SetConfiguration
    epoch: int
    master: WalReplica | None
    electing: bool
    committed: int


class Controllers:
    """The controllers' state machine, with one replica set whose members are all brokers of the world."""

    SET = 0

    def __init__(self, wals: dict[int, str], policy: ReplicationPolicy) -> None:
        """`wals`: the id of each broker's WAL."""
        self.machine = ControllerState()
        self.registrations: dict[int, int] = {}
        self._incarnations = itertools.count(1)
        self._index = 0
        self.run(c.BecomeActive(0, 1, "cluster", 0))
        for broker_id in wals:
            self.register(broker_id)
        self.run(c.Elect(self.SET, self.SET))
        fields = msgspec.structs.fields(PolicyRecord)
        self.run(r.SetReplicaSetPolicy(self.SET, PolicyRecord(*(getattr(policy, each.name) for each in fields))))
        for broker_id, wal_id in wals.items():
            self.join(broker_id, wal_id)
        record = self.machine.tables.replica_sets.rows[self.SET]
        members = tuple(r.ReportedMember(*each) for each in wals.items())
        self.run(
            r.AlterSyncStateSet(
                self.SET,
                self.SET,
                self.registrations[self.SET],
                record.master_epoch,
                record.sync_state_set_epoch,
                members,
                policy.quorum(len(wals), len(wals)),
            )
        )
        for broker_id in wals:
            self.set_dead(broker_id)
        self.run(r.BeginElection(self.SET, record.master_epoch, "the world begins"))

    def run(self, command: c.AnyCommand) -> None:
        """Apply a command. Raises its refusal, and `Violation` if it met a defect."""
        self._index += 1
        envelope = c.Envelope(c.FORMAT_VERSION, 1, self._index, "", 0, 0, command, self._index)
        result = c.decode_result(self.machine.apply(c.decode_envelope(c.encode(envelope)), self._index).result)
        if self.machine.failed is not None:
            raise Violation(f"the state machine failed: {self.machine.failed}")
        if result.error is not None:
            raise from_wire(result.error)

    def register(self, broker_id: int) -> None:
        """A new process of a broker begins."""
        name = f"process-{next(self._incarnations)}"
        self.run(c.RegisterBroker(broker_id, f"check-{broker_id}", name, "host", 9092, "", "", "disk"))
        self.registrations[broker_id] = self.machine.tables.brokers.rows[broker_id].registration_epoch

    def join(self, broker_id: int, wal_id: str) -> None:
        """A broker tells the WAL that it has; one that was not assigned before is."""
        if broker_id != self.SET and broker_id not in self.machine.tables.replication.rows[self.SET].assigned:
            self.run(r.AssignReplica(self.SET, broker_id))
        self.run(r.AddReplica(self.SET, broker_id, self.registrations[broker_id], wal_id))

    def set_dead(self, broker_id: int) -> None:
        """A broker's session has ended."""
        self.run(c.SetBrokerAlive(broker_id, self.registrations[broker_id], False))

    def commit(self, epoch: int, end: int) -> None:
        """A master's upload is committed, unless it is fenced."""
        committed = self.machine.tables.replica_sets.rows[self.SET].committed_wal_offset
        self.run(c.Commit(CommitObjects(self.SET, epoch, min(committed, end), end, ())))

    def state(self) -> State:
        """Return the replica set as it is now."""
        tables = self.machine.tables
        record, row = tables.replica_sets.rows[self.SET], tables.replication.rows[self.SET]
        master = next((each.replica for each in row.in_sync if each.broker_id == record.master), None)
        return State(
            self.machine.version,
            row.configuration(record.sync_state_set_epoch).check(),
            record.master_epoch,
            master,
            row.election is not None,
            record.committed_wal_offset,
        )
