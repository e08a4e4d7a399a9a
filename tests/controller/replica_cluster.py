"""`ReplicaCluster`: brokers that keep replicas of each other's sets, as the controllers' state machine sees them.

The brokers do what they are told: they join the sets that they are assigned to, promise, and as masters ask for all
living members that have joined. Nothing is replicated here.
"""

from __future__ import annotations

from collections import Counter

from tests.controller.controller_helpers import Driver
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.records import DrainMode, ReplicaSetRecord
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.errors import TidelogError

REPAIR_S = 600.0
TWO_OF_THREE = PolicyRecord(3, 2, 1)


class ReplicaCluster(Driver):
    """A cluster whose sets all have the same policy; `tick` lets a second pass."""

    def __init__(
        self,
        racks: list[str],
        policy: PolicyRecord = TWO_OF_THREE,
        settings: ControllerSettings | None = None,
    ) -> None:
        super().__init__()
        self.duties = Duties(lambda: self.image, BrokerSessions(10.0), dict, settings or ControllerSettings())
        self.now_s = 0.0
        self.starts = 0
        self.hung: set[int] = set()
        """Brokers that do nothing of what they are told."""
        self.done: list[c.AnyCommand] = []
        """What the active controller did by itself."""
        for broker_id, rack in enumerate(racks):
            self.start(broker_id, rack)
        for broker_id in range(len(racks)):
            self.run(r.SetReplicaSetPolicy(broker_id, policy))
            self.join(broker_id, broker_id)

    def start(self, broker_id: int, rack: str = "", wal_kind: str = "disk") -> None:
        """A new process of a broker begins, and is elected where that needs no promises."""
        self.starts += 1
        command = c.RegisterBroker(
            broker_id, f"check-{broker_id}", f"process-{self.starts}", "host", 9092, rack, "", wal_kind, "host:9095"
        )
        self.run(command, int)
        try:
            self.run(c.Elect(broker_id, broker_id))
        except TidelogError:
            assert len(self.record(broker_id).members) > 1, "a set of several members elects by promises"

    def record(self, set_id: int) -> ReplicaSetRecord:
        return self.image.replica_sets[set_id]

    def assigned(self, set_id: int) -> list[int]:
        return list(self.image.replication[set_id].assigned)

    def loads(self) -> Counter[int]:
        """Replicas by broker."""
        return Counter(each for row in self.image.replication.values() for each in row.assigned)

    def join(self, set_id: int, broker_id: int) -> None:
        if set_id != broker_id and broker_id not in self.assigned(set_id):
            self.run(r.AssignReplica(set_id, broker_id))
        registration = self.image.brokers[broker_id].registration_epoch
        self.run(r.AddReplica(set_id, broker_id, registration, f"wal-{set_id}-{broker_id}"))

    def set_alive(self, broker_id: int, alive: bool) -> None:
        self.run(c.SetBrokerAlive(broker_id, self.image.brokers[broker_id].registration_epoch, alive))

    def drain(self, broker_id: int, mode: DrainMode) -> None:
        self.run(c.DrainBroker(broker_id, mode, self.image.brokers[broker_id].registration_epoch))

    def works(self, broker_id: int) -> bool:
        broker = self.image.brokers.get(broker_id)
        return broker is not None and broker.alive and broker_id not in self.hung and broker.wal_kind == "disk"

    # --- what brokers do -----------------------------------------------------------------------------------------

    def brokers_act(self) -> None:
        """Each broker does once what is due of it."""
        for set_id, row in sorted(self.image.replication.items()):
            for broker_id in row.assigned:
                if self.works(broker_id) and row.replica(broker_id) is None and (row.in_sync or broker_id == set_id):
                    self.join(set_id, broker_id)
            if row.election is not None:
                for each in self.image.replication[set_id].replicas:
                    if self.works(each.broker_id) and self.image.election(set_id) is not None:
                        self.promise(set_id, each.broker_id)
            elif self.image.master_of(set_id) is not None and self.works(self.record(set_id).master):
                self.alter(set_id)

    def promise(self, set_id: int, broker_id: int, end: int = 0) -> None:
        registration = self.image.brokers[broker_id].registration_epoch
        wal = f"wal-{set_id}-{broker_id}"
        epoch = self.record(set_id).master_epoch
        self.run(r.PromiseEpoch(set_id, epoch, broker_id, registration, wal, 0, end, 0))

    def alter(self, set_id: int) -> None:
        """The master asks for the living members, as many as its quorum of two needs at least."""
        record, row = self.record(set_id), self.image.replication[set_id]
        if not row.in_sync:
            return
        living = {each.broker_id for each in row.replicas if self.works(each.broker_id) and not each.is_learner}
        living -= {*row.leaving}
        members = living if len(living) >= 2 else {*record.sync_state_set}
        if members == {*record.sync_state_set}:
            return
        told = tuple(r.ReportedMember(each, f"wal-{set_id}-{each}") for each in sorted(members))
        registration = self.image.brokers[record.master].registration_epoch
        numbers = record.master, registration, record.master_epoch, record.sync_state_set_epoch
        self.run(r.AlterSyncStateSet(set_id, *numbers, told, min(2, len(told))))

    # --- what the active controller does -------------------------------------------------------------------------

    def controller_acts(self) -> list[c.AnyCommand]:
        """One round of the duties about replica sets."""
        found: list[c.AnyCommand] = []
        for duty in (self.duties.masters, self.duties.replicas, self.duties.drains):
            for command in duty(self.now_s, 0):
                self.run(command)
                found.append(command)
        self.done += found
        return found

    def tick(self, seconds: float = 1.0) -> list[c.AnyCommand]:
        """Let time pass, and everybody act once; what the active controller did."""
        self.now_s += seconds
        found = self.controller_acts()
        self.brokers_act()
        moving = tuple((one.topic_id, one.index) for one in self.image.moving())
        if moving:  # all streams are closed here
            self.run(c.ElectPartitions(moving))
        return found

    def settle(self, seconds: int = 20) -> list[c.AnyCommand]:
        """Let `seconds` pass; what the active controller did."""
        return [command for _ in range(seconds) for command in self.tick()]
