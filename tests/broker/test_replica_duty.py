"""`ReplicaDuty` with a real controller, real sockets and real disks: brokers that keep a replica set by themselves."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.controller.controller_helpers import make_client, make_node, until
from tests.support.hot_replicas import Broker, HotSet, Proxy
from tidelog.broker.replication.authority import ControllerAuthority
from tidelog.broker.replication.duty import DutyEvents, ReplicaDuty, ReplicaRole
from tidelog.broker.replication.inputs import ReplicaIdentity, SetAuthority
from tidelog.broker.replication.master import ReplicaMaster
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.model.wal_notes import WalLost
from tidelog.controller.node import ControllerNode
from tidelog.runtime.errors import TidelogError
from tidelog.storage.replication.configuration import WalReplica

pytestmark = pytest.mark.timeout(300)

SET = 1
"""The replica set of broker 1."""
POLICY_ROW = PolicyRecord(3, 2, 1, max_behind_s=1.0, slave_timeout_s=1.0)


class Process:
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
        self.processes: dict[int, Process] = {}
        self.registrations: dict[int, int] = {}

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

    async def launch(self, broker_id: int) -> Process:
        """Start a broker's process."""
        client, proxy = await self.register(broker_id)
        process = self.processes[broker_id] = Process(client, proxy)
        if broker_id == SET and self.node.image.replica_sets[SET].members == (SET,):
            await client.elect(SET, SET)
        process.broker = await self.start(broker_id)
        proxy.to = process.broker.listener.address
        events = DutyEvents(process.leads, process.ended, process.failures.append)
        process.duty = ReplicaDuty(
            process.broker.replica, self.identity(broker_id), client, random.Random(broker_id), events
        )
        process.duty.start()
        return process

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
        await process.duty.close()
        await self.kill(broker_id)
        await process.client.close()
        await until(lambda: not self.node.image.brokers[broker_id].alive)

    async def finish(self) -> None:
        for process in self.processes.values():
            await process.proxy.close()
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


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[SelfKeptSet]:
    here = SelfKeptSet(tmp_path)
    await here.begin()
    yield here
    await here.finish()


async def test_brokers_join_a_set_and_another_leads_after_its_master_was_killed(kept: SelfKeptSet) -> None:
    first = await kept.settled()
    assert first.broker_id == 1
    end = await kept.write(first, 200)
    await kept.confirmed(first)
    await kept.end(1)
    second = await kept.settled()
    assert second.broker_id in (2, 3) and second.wal.end_offset >= end
    await kept.confirmed(second, end)
    await kept.write(second, 50)
    await kept.confirmed(second)
    await kept.launch(1)
    await kept.settled()
    await kept.same()
    assert {each: one.duty.role for each, one in kept.processes.items() if each != second.broker_id} == {
        each: ReplicaRole.FOLLOWING for each in (1, 2, 3) if each != second.broker_id
    }
    assert all(one.failures == [] for one in kept.processes.values())


async def test_an_election_among_living_brokers_ends_a_term_before_the_next_one_begins(kept: SelfKeptSet) -> None:
    first = await kept.settled()
    await kept.write(first, 50)
    epoch = kept.node.image.replica_sets[SET].master_epoch
    await kept.processes[2].client.replica_sets.begin_election(SET, epoch, "an operator asks", designated=2)
    second = await kept.settled()
    assert second.broker_id == 2
    await kept.write(second, 50)
    await kept.confirmed(second)
    await kept.same()
    assert kept.processes[1].terms == [("leads", epoch), ("ended", epoch)]
    assert kept.processes[2].terms == [("leads", epoch + 1)]


async def test_a_process_that_was_replaced_promises_nothing_any_more(kept: SelfKeptSet) -> None:
    first = await kept.settled()
    await kept.write(first, 20)
    await kept.confirmed(first)
    epoch = kept.node.image.replica_sets[SET].master_epoch
    client, proxy = await kept.register(1)  # another process over the same directory, which goes no further
    replaced = kept.processes[1]
    await until(lambda: replaced.failures != [] or replaced.duty.role is ReplicaRole.FAILED)
    assert replaced.terms == [("leads", epoch), ("ended", epoch)]
    assert "is not current" in replaced.duty.problem
    await proxy.close()
    await client.close()
    await kept.end(1)
    second = await kept.settled()
    assert second.broker_id in (2, 3)


async def test_a_policy_that_is_set_reaches_the_master(kept: SelfKeptSet) -> None:
    await kept.settled()
    image = kept.node.image
    wanted = PolicyRecord(3, 3, 2, max_behind_s=1.0, slave_timeout_s=1.0)
    await kept.processes[1].client.replica_sets.set_policy(SET, wanted)

    def quorum() -> int:
        configuration = image.configuration(SET)
        return configuration.quorum if configuration is not None else 0

    await until(lambda: quorum() == 3)


async def test_a_replica_that_was_removed_does_not_join_again(kept: SelfKeptSet) -> None:
    first = await kept.settled()
    third = kept.processes[3]
    follower = third.broker.replica.follower
    assert follower is not None
    await follower.stop()  # it hangs
    await until(lambda: kept.node.image.replica_sets[SET].sync_state_set == (1, 2))
    await kept.processes[1].client.replica_sets.remove_replica(SET, 3)
    await until(lambda: third.duty.role is ReplicaRole.REMOVED)
    assert 3 not in kept.node.image.replica_sets[SET].members
    assert "was removed" in third.duty.problems()[0]
    assert first.broker_id == 1 and third.failures == []


async def test_a_directory_that_was_set_back_promises_nothing(kept: SelfKeptSet, tmp_path: Path) -> None:
    first = await kept.settled()
    patient = PolicyRecord(3, 2, 1, max_behind_s=600.0, slave_timeout_s=1.0)  # who is away stays in the SyncStateSet
    await kept.processes[1].client.replica_sets.set_policy(SET, patient)
    await kept.write(first, 20)
    await kept.confirmed(first)
    await kept.end(3)
    shutil.copytree(tmp_path / "wal-3", tmp_path / "old")
    await kept.launch(3)
    first = await kept.settled()
    await kept.write(first, 200)
    await kept.same()
    epoch = kept.node.image.replica_sets[SET].master_epoch
    await kept.processes[1].client.replica_sets.begin_election(SET, epoch, "tells where its WAL ends", designated=3)
    assert (await kept.settled()).broker_id == 3
    await kept.end(3)
    shutil.rmtree(tmp_path / "wal-3")
    shutil.move(tmp_path / "old", tmp_path / "wal-3")
    for each in (1, 2):
        await kept.end(each)
    process = await kept.launch(3)
    await until(lambda: process.failures != [])
    assert isinstance(process.failures[0], WalLost)
    assert process.duty.role is ReplicaRole.FAILED and process.terms == []
    assert isinstance(process.failures[0], TidelogError) and "had offsets up to" in process.duty.problem
    await kept.launch(1)
    second = await kept.launch(2)
    await until(lambda: kept.node.image.replica_sets[SET].master in (1, 2))
    assert second.failures == []
