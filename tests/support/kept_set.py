"""Brokers that keep one replica set by themselves: a real controller, real sockets, real disks, a `ReplicaDuty` each.

Entry: `SelfKeptSet`.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.controller.controller_helpers import make_client, make_node, until
from tests.support.hot_replicas import Broker, HotSet, Proxy
from tidelog.broker.replication.authority import ControllerAuthority
from tidelog.broker.replication.duty import DutyEvents, ReplicaDuty
from tidelog.broker.replication.inputs import ReplicaIdentity, SetAuthority
from tidelog.broker.replication.master import ReplicaMaster
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.storage.replication.configuration import WalReplica

SET = 1
"""The replica set of broker 1."""
POLICY_ROW = PolicyRecord(3, 2, 1, max_behind_s=1.0, slave_timeout_s=1.0)


class KeptProcess:
    """One broker's process: its client, its replica, and what its duty has told."""

    def __init__(self, client: ControllerClient, proxy: Proxy) -> None:
        self.client = client
        self.proxy = proxy
        self.terms: list[tuple[str, int]] = []
        self.failures: list[BaseException] = []
        self.broker: Broker
        self.duty: ReplicaDuty

    def leads(self, epoch: int, _master: ReplicaMaster) -> None:
        self.terms.append(("leads", epoch))

    def ended(self, epoch: int) -> None:
        self.terms.append(("ended", epoch))


class SelfKeptSet(HotSet):
    """Three brokers and a controller; nobody tells the replicas what to do but the metadata."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.node: ControllerNode
        self.processes: dict[int, KeptProcess] = {}
        self.registrations: dict[int, int] = {}
        self.priorities: dict[int, int] = {}
        """With which brokers are configured, where it is not 0; read when their processes start."""

    async def begin(self) -> None:
        settings = ControllerSettings(session_timeout_ms=3_600_000)
        self.node = make_node(self.path / "controller", settings=settings)
        await self.node.start()
        await self.node.wait_active(60)
        for each in self.wal_ids:
            await self.launch(each)
        await self.processes[1].client.replica_sets.set_policy(SET, POLICY_ROW)
        await self.settled()

    def identity(self, broker_id: int) -> ReplicaIdentity:
        wal = WalReplica(broker_id, self.wal_ids[broker_id])
        return ReplicaIdentity(SET, wal, self.registrations[broker_id], broker_id in self.learners)

    def authority_of(self, broker_id: int) -> SetAuthority:
        return ControllerAuthority(self.processes[broker_id].client, self.identity(broker_id))

    async def launch(self, broker_id: int) -> KeptProcess:
        """Start a broker's process."""
        is_new = broker_id not in self.registrations
        client, proxy = await self.register(broker_id)
        process = self.processes[broker_id] = KeptProcess(client, proxy)
        if is_new and broker_id != SET:
            await client.replica_sets.assign_replica(SET, broker_id, is_learner=broker_id in self.learners)
        if broker_id == SET and self.node.image.replica_sets[SET].members == (SET,):
            await client.elect(SET, SET)
        process.broker = await self.start(broker_id)
        proxy.to = process.broker.listener.address
        events = await self.begun(process)
        process.duty = ReplicaDuty(
            process.broker.replica,
            self.identity(broker_id),
            client,
            random.Random(broker_id),
            events,
            priority=self.priorities.get(broker_id, 0),
        )
        process.duty.start()
        return process

    async def begun(self, process: KeptProcess) -> DutyEvents:
        """A process has its replica; return who is told of its terms."""
        return DutyEvents(process.leads, process.ended, process.failures.append)

    async def ending(self, process: KeptProcess) -> None:
        """A process is about to end."""

    async def register(self, broker_id: int) -> tuple[ControllerClient, Proxy]:
        proxy = Proxy()
        address = f"127.0.0.1:{await proxy.start()}"
        client = make_client(self.node.address, heartbeat_interval_s=0.05, budget_s=60)
        await client.start()
        name = f"process-{self.registrations.get(broker_id, 0)}"
        registration = RegisterBroker(
            broker_id, f"check-{broker_id}", name, "h", 9092, "", "", wal_kind="disk", peer_address=address
        )
        self.registrations[broker_id] = await client.register_broker(registration)
        await until(lambda: self.node.hears(broker_id))
        return client, proxy

    async def end(self, broker_id: int) -> None:
        """Kill a broker's process, and wait until the controllers know."""
        process = self.processes.pop(broker_id)
        await process.proxy.close()
        await self.ending(process)
        await process.duty.close()
        await self.kill(broker_id)
        await process.client.close()
        await until(lambda: not self.node.image.brokers[broker_id].alive)

    async def finish(self) -> None:
        for process in self.processes.values():
            await process.proxy.close()
            await self.ending(process)
            await process.duty.close()
        await self.close()
        for process in self.processes.values():
            await process.client.close()
        await self.node.close()

    def leader(self) -> Broker:
        record = self.node.image.replica_sets[SET]
        return self.brokers[record.master]

    async def settled(self) -> Broker:
        """Wait until a master leads, and all processes are in its SyncStateSet."""

        def is_settled() -> bool:
            record = self.node.image.replica_sets[SET]
            if record.master not in self.brokers:
                return False
            master = self.brokers[record.master].replica.master
            wanted = tuple(each for each in sorted(self.brokers) if each not in self.learners)
            return master is not None and master.epoch == record.master_epoch and record.sync_state_set == wanted

        try:
            await until(is_settled)
        except TimeoutError:
            problems = {each: one.duty.problems() for each, one in self.processes.items()}
            raise AssertionError(f"{self.node.image.replica_sets[SET]} {problems}\n{self.state()}") from None
        return self.leader()
