"""`ControllerAuthority` with a real controller and clients, over sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.controller.controller_helpers import ask, make_client, make_node, until
from tests.support.ports import free_port
from tidelog.broker.replication.authority import ControllerAuthority
from tidelog.broker.replication.inputs import AlterRefused, ReplicaIdentity, SetAuthority
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import CommandFailed, NotEligible, StaleCommand
from tidelog.controller.model.replica_set_commands import AlterSyncStateSet
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.connection import CommandParams, RpcConnection
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Fenced, TidelogError, Unavailable
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica

pytestmark = pytest.mark.timeout(300)

WALS = {each: WalReplica(each, f"wal-{each}") for each in range(3)}
SECRET = b"a secret that nobody else has"
ALL = frozenset(WALS.values())


class Faults:
    """What happens to the commands of one client: before they are sent, and to their answers."""

    def __init__(self) -> None:
        self.asked: list[CommandParams] = []
        """Every attempt of a request for a sync-state set."""
        self.answered = 0
        self.connects = 0
        self.before: Callable[[CommandParams], None] = lambda _params: None
        self.after: Callable[[CommandParams], None] = lambda _params: None
        self.held: dict[type[c.AnyCommand], asyncio.Event] = {}
        """Answers to commands of this kind wait."""


class FaultyNetwork(TcpNetwork):
    """Connections of a client whose commands meet `faults`."""

    def __init__(self, faults: Faults, credentials: Credentials | None) -> None:
        self._faults = faults
        self._credentials = credentials

    async def connect(self, factory: Any, host: str, port: int, *, timeout_s: float) -> Any:
        faults = self._faults

        class Faulty(RpcConnection):
            async def call(self, method: str, params: Any, timeout_s: float, cluster_id: str = "") -> Any:
                if method != "command":
                    return await super().call(method, params, timeout_s, cluster_id)
                kind = type(c.decode_command(params.command))
                if kind is not AlterSyncStateSet:
                    answer = await super().call(method, params, timeout_s, cluster_id)
                    if kind in faults.held:
                        await faults.held[kind].wait()
                    return answer
                faults.asked.append(params)
                faults.before(params)
                answer = await super().call(method, params, timeout_s, cluster_id)
                faults.after(params)
                faults.answered += 1
                return answer

        faults.connects += 1
        return await super().connect(lambda: Faulty(credentials=self._credentials), host, port, timeout_s=timeout_s)


class World:
    """A controller, and three brokers whose replica set 0 is led by broker 0."""

    credentials: Credentials | None = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.faults = Faults()
        self.node: ControllerNode
        self.brokers: dict[int, ControllerClient] = {}
        self.registrations: dict[int, int] = {}

    async def start(self) -> None:
        await self.start_controller(0)
        for each in WALS:
            await self.connect(each)
        await self.brokers[0].elect(0, 0)
        await self.brokers[0].replica_sets.set_policy(0, PolicyRecord(3, 2, 1))
        for each in WALS:
            await self.join(each)

    async def start_controller(self, port: int) -> None:
        self.node = make_node(self.directory, settings=ControllerSettings(session_timeout_ms=3_600_000, port=port))
        await self.node.start()
        await self.node.wait_active(60)

    async def connect(self, broker_id: int, budget_s: float = 60) -> None:
        """Start a process of a broker."""
        network = FaultyNetwork(self.faults, self.credentials) if broker_id == 0 else TcpNetwork()
        client = self.client(network, budget_s)
        await client.start()
        name = f"process-{self.registrations.get(broker_id, 0)}"
        registration = c.RegisterBroker(broker_id, f"check-{broker_id}", name, "h", 9092, "", "")
        self.registrations[broker_id] = await client.register_broker(registration)
        self.brokers[broker_id] = client
        await until(lambda: self.node.hears(broker_id))

    def client(self, network: TcpNetwork, budget_s: float) -> ControllerClient:
        return make_client(self.node.address, network=network, heartbeat_interval_s=0.05, budget_s=budget_s)

    async def join(self, broker_id: int) -> None:
        wal, registration = WALS[broker_id], self.registrations[broker_id]
        if broker_id != 0:
            await self.brokers[broker_id].replica_sets.assign_replica(0, broker_id)
        await self.brokers[broker_id].replica_sets.add_replica(0, broker_id, registration, wal.wal_id)

    async def kill(self, broker_id: int) -> None:
        """End a broker's process, and wait until the controllers know."""
        await self.brokers.pop(broker_id).close()
        await until(lambda: not self.node.image.brokers[broker_id].alive)

    async def close(self) -> None:
        for client in self.brokers.values():
            await client.close()
        await self.node.close()

    def authority(self, *, of: int = 0, set_id: int = 0, deadline_s: float = 60.0) -> ControllerAuthority:
        identity = ReplicaIdentity(set_id, WALS[of], self.registrations[of])
        return ControllerAuthority(self.brokers[of], identity, deadline_s=deadline_s)

    def present(self) -> SetConfiguration:
        found = self.node.image.configuration(0)
        assert found is not None
        return found

    def wanted(self, *broker_ids: int, quorum: int = 2) -> SetConfiguration:
        return SetConfiguration(self.present().number, frozenset(WALS[each] for each in broker_ids), quorum)

    async def alter(
        self, authority: SetAuthority, wanted: SetConfiguration, *, epoch: int | None = None
    ) -> SetConfiguration:
        if epoch is None:
            epoch = self.node.image.replica_sets[0].master_epoch
        ends = dict.fromkeys(wanted.members, 500)
        return await authority.alter(wanted, master_epoch=epoch, ends=ends, confirm_offset=400)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.start()
    yield made
    await made.close()


class WorldOfThree(World):
    """As `World`, with three controllers; `node` is the active one."""

    credentials = Credentials(SECRET, 0)

    async def start_controller(self, port: int) -> None:
        ports = [free_port() for _ in range(3)]
        members = [f"{each}@127.0.0.1:{ports[each]}" for each in range(3)]
        self.nodes = [
            ControllerNode(
                ControllerIdentity(each, self.directory / str(each), Credentials(SECRET, each)),
                ControllerSections(ControllerSettings(session_timeout_ms=3_600_000, members=members)),
                ControllerWorld(TcpNetwork(), SystemClock(), random.Random()),
            )
            for each in range(3)
        ]
        for node in self.nodes:
            await node.start()
        await self.find_active()

    async def find_active(self) -> None:
        await until(lambda: any(each.is_active for each in self.nodes))
        (self.node,) = [each for each in self.nodes if each.is_active]

    def client(self, network: TcpNetwork, budget_s: float) -> ControllerClient:
        addresses = [each.address for each in self.nodes]
        return make_client(*addresses, network=network, budget_s=budget_s, credentials=self.credentials)

    async def close(self) -> None:
        for client in self.brokers.values():
            await client.close()
        for node in self.nodes:
            await node.close()


def next_of(wanted: SetConfiguration) -> SetConfiguration:
    return wanted._replace(number=wanted.number + 1)


def lose(_params: CommandParams) -> None:
    raise Unavailable("the network lost it")


async def test_an_accepted_configuration_is_the_next_one_with_what_the_master_knows_of_each_wal(world: World) -> None:
    authority, wanted = world.authority(), world.wanted(0, 1, 2)
    assert await world.alter(authority, wanted) == next_of(wanted) == world.present()
    rows = world.node.image.replication[0].in_sync
    assert [(each.replica, each.end_offset, each.confirm_offset) for each in rows] == [
        (WALS[each], 500, 400) for each in WALS
    ]
    assert await world.alter(authority, wanted) == next_of(wanted), "asked again by another command"
    assert world.present() == next_of(wanted)
    fewer = next_of(wanted)._replace(members=frozenset({WALS[0], WALS[2]}))
    ends = {WALS[0]: 900, WALS[1]: 950}
    epoch = world.node.image.replica_sets[0].master_epoch
    assert await authority.alter(fewer, master_epoch=epoch, ends=ends, confirm_offset=850) == next_of(fewer)
    rows = world.node.image.replication[0].in_sync
    assert [(each.broker_id, each.end_offset, each.confirm_offset) for each in rows] == [(0, 900, 850), (2, 500, 400)]


async def test_a_member_that_is_not_alive_is_refused_and_the_term_goes_on(world: World) -> None:
    authority, before = world.authority(), world.present()
    await world.kill(2)
    with pytest.raises(AlterRefused, match="not alive"):
        await world.alter(authority, world.wanted(0, 1, 2))
    assert world.present() == before
    assert [each.sequence - world.faults.asked[0].sequence for each in world.faults.asked] == [0, 1]
    wanted = world.wanted(0, 1)
    assert await world.alter(authority, wanted) == next_of(wanted)


async def test_a_master_whose_term_has_ended_is_fenced(world: World) -> None:
    authority, wanted = world.authority(), world.wanted(0, 1)
    epoch = world.node.image.replica_sets[0].master_epoch
    with pytest.raises(Fenced, match="is not the master"):
        await world.alter(authority, wanted, epoch=epoch - 1)
    with pytest.raises(Fenced, match="is not the master"):
        await world.alter(world.authority(of=1), wanted)
    with pytest.raises(Fenced, match="no replica set"):
        await world.alter(world.authority(set_id=77), wanted)
    stale = ControllerAuthority(world.brokers[0], ReplicaIdentity(0, WALS[0], world.registrations[0] - 1))
    with pytest.raises(Fenced, match="registration"):
        await world.alter(stale, wanted)
    newer = wanted._replace(number=wanted.number + 5)
    with pytest.raises(Fenced, match="its master has seen"):
        await world.alter(authority, newer)
    assert await world.alter(authority, wanted) == next_of(wanted)
    await world.brokers[1].replica_sets.begin_election(0, epoch, "test")
    with pytest.raises(Fenced):
        await world.alter(authority, next_of(wanted)._replace(quorum=1), epoch=epoch)


async def test_a_master_that_asks_for_what_is_over_learns_what_is_in_force_and_is_not_deposed(world: World) -> None:
    authority, wanted = world.authority(), world.wanted(0, 1)
    await world.alter(authority, wanted)
    other = wanted._replace(members=ALL)
    assert await world.alter(authority, other) == next_of(wanted) == world.present()


async def test_a_set_that_has_lost_its_last_other_replica_refuses_and_leaves_the_master_in_office(world: World) -> None:
    authority, wanted = world.authority(), world.wanted(0, 1)
    for each in (1, 2):
        await world.brokers[0].replica_sets.remove_replica(0, each)
    with pytest.raises(AlterRefused, match="has one member") as refused:
        await world.alter(authority, wanted)
    assert isinstance(refused.value.__cause__, NotEligible)


async def test_an_answer_that_is_lost_is_asked_for_under_the_same_number(world: World) -> None:
    def lose_three(_params: CommandParams) -> None:
        if len(world.faults.asked) <= 3:
            raise Unavailable("the answer is lost")

    world.faults.after = lose_three
    wanted = world.wanted(0, 1)
    assert await world.alter(world.authority(), wanted) == next_of(wanted) == world.present()
    assert len(world.faults.asked) == 4
    assert len({(each.client_id, each.sequence) for each in world.faults.asked}) == 1


async def test_a_request_without_an_answer_in_time_is_told_the_same_result_when_it_is_asked_again(
    world: World,
) -> None:
    world.faults.after = lose
    wanted = world.wanted(0, 1)
    with pytest.raises(Unavailable, match="no answer to a sync-state set within"):
        await world.alter(world.authority(deadline_s=0.5), wanted)
    assert world.present() == next_of(wanted), "it took effect"
    world.faults.after = lambda _params: None
    assert await world.alter(world.authority(), wanted) == next_of(wanted) == world.present()


async def unanswered(world: World, wanted: SetConfiguration) -> CommandParams:
    """Ask for a configuration; return the request, which is still on its way."""
    world.faults.before = lose
    with pytest.raises(Unavailable):
        await world.alter(world.authority(deadline_s=0.3), wanted)
    world.faults.before = lambda _params: None
    copy = world.faults.asked[0]
    world.faults.asked.clear()
    return copy


async def deliver(world: World, copy: CommandParams) -> c.Result:
    return c.decode_result(await ask(world.node, "command", copy))


async def test_a_copy_that_comes_after_the_refusal_has_no_effect(world: World) -> None:
    wanted = world.wanted(0, 1, 2)
    copy = await unanswered(world, wanted)
    await world.kill(2)
    with pytest.raises(AlterRefused, match="not alive"):
        await world.alter(world.authority(), wanted)
    await world.connect(2)
    await world.join(2)
    before = world.present()
    late = await deliver(world, copy)
    assert late.error is not None and late.error.name == StaleCommand.__name__
    assert world.present() == before == wanted._replace(members=before.members, quorum=before.quorum)


async def test_a_refusal_waits_for_earlier_commands_and_tells_of_a_copy_that_took_effect_meanwhile(
    world: World,
) -> None:
    held = world.faults.held[c.PutKv] = asyncio.Event()
    slow = asyncio.create_task(world.brokers[0].put_kv("key", b"value"))
    await until(lambda: "key" in world.node.image.kv)
    wanted = world.wanted(0, 1, 2)
    copy = await unanswered(world, wanted)
    await world.kill(2)
    asking = asyncio.create_task(world.alter(world.authority(), wanted))
    await until(lambda: world.faults.answered == 1)  # refused
    await world.connect(2)
    await world.join(2)
    late = await deliver(world, copy)
    assert late.error is None and world.present() == next_of(wanted)
    assert not asking.done() and len(world.faults.asked) == 1
    held.set()
    assert await asking == next_of(wanted)
    assert len(world.faults.asked) == 2
    await slow


async def test_a_controller_that_is_away_is_waited_for_and_asked_again_when_it_is_back(world: World) -> None:
    address, wanted = world.node.address, world.wanted(0, 1)
    epoch = world.node.image.replica_sets[0].master_epoch
    await world.node.close()
    with pytest.raises(Unavailable):
        await world.alter(world.authority(deadline_s=0.2), wanted, epoch=epoch)
    asking = asyncio.create_task(world.alter(world.authority(), wanted, epoch=epoch))
    attempts = world.faults.connects
    await until(lambda: world.faults.connects >= attempts + 5)
    assert not asking.done()
    await world.start_controller(address[1])
    assert await asking == next_of(wanted) == world.present()


@pytest.mark.parametrize("is_applied", [True, False])
async def test_another_controller_becomes_active_before_the_answer_came(tmp_path: Path, is_applied: bool) -> None:
    world = WorldOfThree(tmp_path)
    await world.start()
    epoch, wanted = world.node.image.replica_sets[0].master_epoch, world.wanted(0, 1)
    if is_applied:
        world.faults.after = lose
    else:
        world.faults.before = lose
    asking = asyncio.create_task(world.alter(world.authority(), wanted))
    await until(lambda: len(world.faults.asked) >= 1 and (world.present().number > wanted.number or not is_applied))
    old = world.node
    world.nodes.remove(old)
    await old.close()
    await world.find_active()
    world.faults.before = world.faults.after = lambda _params: None
    assert await asking == next_of(wanted)
    assert len({(each.client_id, each.sequence) for each in world.faults.asked}) == 1
    await until(lambda: world.present() == next_of(wanted))
    assert world.node.image.replica_sets[0].master_epoch == epoch
    await world.close()


async def test_the_clients_own_deadline_is_an_outcome_that_is_not_known(world: World) -> None:
    await world.kill(0)
    await world.connect(0, budget_s=0.2)
    world.faults.before = lose
    with pytest.raises(Unavailable, match="did not answer within"):
        await world.alter(world.authority(), world.wanted(0, 1))


async def test_an_error_of_no_known_meaning_leaves_the_outcome_open(world: World) -> None:
    for error in (CommandFailed("it met a defect"), StaleCommand("too old")):

        def fail(_params: CommandParams, error: TidelogError = error) -> None:
            raise error

        world.faults.before = fail
        with pytest.raises(Unavailable, match=f"answered with {type(error).__name__}: {error.message}"):
            await world.alter(world.authority(), world.wanted(0, 1))


async def test_those_may_follow_who_have_a_replica_of_the_set_under_their_present_registration(world: World) -> None:
    authority, registrations = world.authority(), world.registrations
    assert authority.admits(WALS[1], registrations[1], learner=False)
    assert not authority.admits(WALS[1], registrations[1], learner=True)
    assert not authority.admits(WALS[1], registrations[1] - 1, learner=False)
    assert not authority.admits(WalReplica(1, "another WAL"), registrations[1], learner=False)
    assert not authority.admits(WalReplica(7, "wal-7"), 1, learner=False)
    assert not world.authority(set_id=1).admits(WALS[2], registrations[2], learner=False)
    master = world.brokers[0].replica_sets
    await master.remove_replica(0, 2)
    assert not authority.admits(WALS[2], registrations[2], learner=False)
    await master.assign_replica(0, 2, is_learner=True)
    await master.add_replica(0, 2, registrations[2], WALS[2].wal_id, is_learner=True)
    assert authority.admits(WALS[2], registrations[2], learner=True)
    assert not authority.admits(WALS[2], registrations[2], learner=False)
    assert not world.authority(set_id=77).admits(WALS[2], registrations[2], learner=True)
