"""Replica sets of several members through real controllers and clients, over sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.controller.controller_helpers import make_client, make_node, until
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.errors import ConfigurationRefused, NotEligible
from tidelog.controller.model.replica_set_commands import PromiseEpoch
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.runtime.errors import Fenced, InvalidInput
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica

WALS = {each: WalReplica(each, f"wal-{each}") for each in range(3)}


class World:
    """A controller, and three brokers that keep replica set 0 (as far as the controller knows)."""

    node: ControllerNode
    brokers: dict[int, ControllerClient]
    registrations: dict[int, int]

    async def start(self, directory: Path) -> None:
        self.node = make_node(directory, settings=ControllerSettings(session_timeout_ms=3_600_000))
        await self.node.start()
        await self.node.wait_active(60)
        self.brokers, self.registrations = {}, {}
        for each in WALS:
            await self.connect(each)
        master = self.brokers[0]
        await master.elect(0, 0)
        await master.replica_sets.set_policy(0, PolicyRecord(3, 2, 1))
        for each, wal in WALS.items():
            if each != 0:
                await master.replica_sets.assign_replica(0, each)
            await self.brokers[each].replica_sets.add_replica(0, each, self.registrations[each], wal.wal_id)

    async def connect(self, broker_id: int) -> None:
        client = make_client(self.node.address, heartbeat_interval_s=0.05, budget_s=60)
        await client.start()
        name = f"process-{self.registrations.get(broker_id, 0)}"
        registration = RegisterBroker(broker_id, f"check-{broker_id}", name, "h", 9092, "", "")
        self.registrations[broker_id] = await client.register_broker(registration)
        self.brokers[broker_id] = client
        await until(lambda: self.node.hears(broker_id))

    async def close(self) -> None:
        for client in self.brokers.values():
            await client.close()
        await self.node.close()

    async def alter(self, wanted: SetConfiguration) -> None:
        client = self.brokers[0]
        await client.replica_sets.alter_sync_state_set(
            0,
            wanted,
            master=(0, self.registrations[0]),
            master_epoch=client.image.replica_sets[0].master_epoch,
            ends=dict.fromkeys(wanted.members, 500),
            confirm_offset=400,
        )

    async def promise(self, broker_id: int, end: int) -> int:
        """Promise the epoch that the broker's own image shows; the master after that."""
        client = self.brokers[broker_id]
        await until(lambda: client.image.election(0) is not None)
        epoch = client.image.replica_sets[0].master_epoch
        registration, wal = self.registrations[broker_id], WALS[broker_id].wal_id
        after = await client.replica_sets.promise(PromiseEpoch(0, epoch, broker_id, registration, wal, 1, end, 400))
        return after.master


async def test_a_master_dies_and_the_promises_of_the_others_elect(tmp_path: Path) -> None:
    world = World()
    await world.start(tmp_path)
    number = world.brokers[0].image.replica_sets[0].sync_state_set_epoch
    everybody = SetConfiguration(number, frozenset(WALS.values()), 2)
    await world.alter(everybody)
    await world.alter(everybody)  # asked again by another command: success
    assert world.brokers[0].image.configuration(0) == everybody._replace(number=number + 1)
    with pytest.raises(ConfigurationRefused, match="has not joined"):
        stranger = WalReplica(2, "another disk")
        await world.alter(SetConfiguration(number + 1, frozenset({WALS[0], stranger}), 1))
    with pytest.raises(Fenced):
        await world.alter(SetConfiguration(number - 1, frozenset({WALS[0]}), 1))

    epoch = world.brokers[1].image.replica_sets[0].master_epoch
    await world.brokers[0].close()  # its connection closes: the active controller finds it dead, and begins
    assert await world.promise(1, end=500) == -1
    assert await world.promise(2, end=600) == 2
    await until(lambda: world.brokers[1].image.replica_sets[0].master == 2)
    record = world.brokers[1].image.replica_sets[0]
    assert (record.master_epoch, record.sync_state_set) == (epoch + 1, (0, 1, 2))
    assert world.brokers[1].image.election(0) is None

    await world.connect(0)  # a new process of the old master is a follower
    await world.brokers[0].replica_sets.add_replica(0, 0, world.registrations[0], WALS[0].wal_id)
    assert world.brokers[0].image.replica_sets[0].master == 2
    with pytest.raises(NotEligible, match="several members"):
        await world.brokers[0].elect(0, 0)
    await world.close()


async def test_an_operator_designates_and_a_controller_goes_on_after_a_restart(tmp_path: Path) -> None:
    world = World()
    await world.start(tmp_path)
    number = world.brokers[0].image.replica_sets[0].sync_state_set_epoch
    await world.alter(SetConfiguration(number, frozenset(WALS.values()), 2))
    operator = world.brokers[2].replica_sets
    begun = await operator.begin_election(0, world.brokers[2].image.replica_sets[0].master_epoch, "test", designated=1)
    assert begun.master == -1
    for each in (0, 2):
        assert await world.promise(each, end=500) == -1, "the designated one lives, and is waited for"
    address = world.node.address
    await world.node.close()
    settings = ControllerSettings(session_timeout_ms=3_600_000, port=address[1])
    world.node = make_node(tmp_path, settings=settings)
    await world.node.start()
    await world.node.wait_active(60)
    assert await world.promise(1, end=500) == 1, "the promises before it are in the log"
    with pytest.raises(NotEligible, match="in the sync-state set"):
        await operator.remove_replica(0, 2)
    with pytest.raises(InvalidInput):
        await operator.set_policy(0, PolicyRecord(1, 2, 1))
    await world.close()
