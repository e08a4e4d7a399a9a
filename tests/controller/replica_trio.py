"""`Trio`: a replica set of three brokers in the controllers' state machine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.controller.controller_helpers import Driver
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.records import ReplicaSetRecord
from tidelog.controller.model.replication import ElectionRecord, PolicyRecord
from tidelog.runtime.errors import TidelogError

TWO_OF_THREE = PolicyRecord(3, 2, 1)
ALL_ACK = PolicyRecord(3, 3, 1, all_ack_in_sync_state_set=True)


class Trio(Driver):
    """Brokers 0, 1 and 2, which keep replica set 0; 0 is its master, and all are in the SyncStateSet."""

    def __init__(self, policy: PolicyRecord = TWO_OF_THREE, quorum: int = 2) -> None:
        super().__init__()
        for each in range(3):
            self.broker(each)
        self.run(r.SetReplicaSetPolicy(0, policy))
        for each in range(3):
            self.join(each)
        self.alter((0, 1, 2), quorum)

    @property
    def record(self) -> ReplicaSetRecord:
        return self.image.replica_sets[0]

    @property
    def assigned(self) -> tuple[int, ...]:
        return self.image.replication[0].assigned

    def registration(self, broker: int) -> int:
        return self.image.brokers[broker].registration_epoch

    def join(self, broker: int, wal: str = "", **more: Any) -> None:
        """A broker joins; one that was not assigned before is."""
        row = self.image.replication.get(0)
        if broker != 0 and (row is None or broker not in row.assigned):
            self.run(r.AssignReplica(0, broker, more.get("is_learner", False)))
        self.run(r.AddReplica(0, broker, self.registration(broker), wal or f"wal-{broker}", **more))

    def alteration(self, members: tuple[int, ...], quorum: int, **more: Any) -> r.AlterSyncStateSet:
        told = tuple(r.ReportedMember(each, f"wal-{each}", more.get("end", -1)) for each in members)
        master = more.get("master", 0)
        return r.AlterSyncStateSet(
            0,
            master,
            more.get("registration", self.registration(master)),
            more.get("epoch", self.record.master_epoch),
            more.get("number", self.record.sync_state_set_epoch),
            told,
            quorum,
            more.get("confirm", -1),
        )

    def alter(self, members: tuple[int, ...], quorum: int, **more: Any) -> ReplicaSetRecord:
        found: ReplicaSetRecord = self.run(self.alteration(members, quorum, **more), ReplicaSetRecord)
        return found

    def begin(self, **more: Any) -> ReplicaSetRecord:
        found: ReplicaSetRecord = self.run(
            r.BeginElection(0, self.record.master_epoch, "test", **more), ReplicaSetRecord
        )
        return found

    def promise(self, broker: int, end: int = 100, last: int = 1, **more: Any) -> ReplicaSetRecord:
        command = r.PromiseEpoch(
            0,
            more.get("epoch", self.record.master_epoch),
            broker,
            more.get("registration", self.registration(broker)),
            more.get("wal", f"wal-{broker}"),
            last,
            end,
            more.get("confirm", 0),
        )
        found: ReplicaSetRecord = self.run(command, ReplicaSetRecord)
        return found

    def die(self, *brokers: int) -> None:
        for each in brokers:
            self.run(c.SetBrokerAlive(each, self.registration(each), False))

    def restart(self, broker: int) -> None:
        self.run(c.RegisterBroker(broker, "check", f"again-{self.index}", "host", 9092, "", ""), int)

    def election(self) -> ElectionRecord:
        found = self.image.election(0)
        assert found is not None
        return found

    def unchanged(self, command: c.AnyCommand, error: type[TidelogError], match: str = ".") -> None:
        """A command is refused and changes nothing."""
        before = self.state.version
        with pytest.raises(error, match=match):
            self.run(command)
        assert self.state.version == before
