"""`ControllerClient` and `ControllerNode` over real loopback connections."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.controller.controller_helpers import KeptNetwork, ask, make_client, make_node, send, until
from tidelog.controller.client import client as client_module
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.client.heartbeat import BEHIND_S, BehindWatch
from tidelog.controller.image import follower as follower_module
from tidelog.controller.image.feed import DeltaFeed, FeedLimits
from tidelog.controller.image.image import Delta
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model import commands as c
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.errors import (
    BrokerIdInUse,
    InvalidPartitions,
    NotController,
    OtherCluster,
    OutcomeUnknown,
    RemoteError,
    StaleBrokerEpoch,
    TopicExists,
    from_wire,
    to_wire,
)
from tidelog.controller.model.levels import NEWEST
from tidelog.controller.model.load import BrokerLoad
from tidelog.controller.model.records import BrokerRecord, ObjectState
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.raft.consensus import MemoryConsensus, Role
from tidelog.controller.rpc.connection import (
    DELTA_VERSION,
    CommandParams,
    HeartbeatParams,
    PollParams,
    RpcChannel,
    RpcConnection,
)
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Fenced, InvalidInput, TidelogError, Unavailable
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.commits import CommitGap, CommitObjects, NewObject, pack_ranges

MakeWorld = Callable[[Path], Awaitable[tuple[ControllerNode, ControllerClient]]]


pytestmark = pytest.mark.timeout(300)


async def world(
    directory: Path, *, network: TcpNetwork | None = None, budget_s: float = 60, **kwargs: Any
) -> tuple[ControllerNode, ControllerClient]:
    """A controller, and a client with this network and budget."""
    node = make_node(directory, **kwargs)
    await node.start()
    await node.wait_active(60)
    client = make_client(node.address, network=network, heartbeat_interval_s=0.05, budget_s=budget_s)
    await client.start()
    return node, client


class Deposable(MemoryConsensus):
    """Consensus whose leader can be told that it is none any more."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[Role], None] = lambda role: None

    def set_on_role(self, callback: Callable[[Role], None]) -> None:
        self.tell = callback
        super().set_on_role(callback)

    def depose(self) -> None:
        self.tell(Role(False, self.role.term + 1, None))


async def register(client: ControllerClient, broker_id: int = 0, check_code: str = "c", incarnation: str = "a") -> int:
    return await client.register_broker(RegisterBroker(broker_id, check_code, incarnation, "h", 9092, "", ""))


async def commit(client: ControllerClient, epoch: int, stream_id: int, start: int, end: int) -> None:
    object_id = await client.prepare_objects(1, 60_000)
    wal = client.committed_wal_offset(0)
    new = NewObject(object_id, 1, 10, pack_ranges([(stream_id, start, end)]))
    await client.commit_objects(CommitObjects(0, epoch, wal, wal + 1, (new,)))


async def local_world(directory: Path, **kwargs: Any) -> tuple[ControllerNode, ControllerClient]:
    """As `world`, with the client of a broker in the controller's own process."""
    node = make_node(directory, serves_broker=True, **kwargs)
    await node.start()
    await node.wait_active(60)
    client = make_client(node.address, heartbeat_interval_s=0.05, budget_s=60, local=node.feed)
    await client.start()
    return node, client


async def test_a_client_in_the_process_of_the_controller_uses_its_image_before_and_after_a_restart(
    tmp_path: Path,
) -> None:
    settings = ControllerSettings(snapshot_entries=20)
    node, client = await local_world(tmp_path, settings=settings)
    deltas: list[Delta] = []
    client.subscribe(deltas.append)
    await register(client)
    epoch = (await client.elect(0, 0)).master_epoch
    topic = await client.create_topic("t", 1, {})
    stream_id = client.image.partitions(topic.id)[0].first_stream
    await client.open_streams(0, epoch, [(stream_id, epoch)])
    for at in range(20):
        await commit(client, epoch, stream_id, at, at + 1)
    assert client.image is node.image
    assert client.image.streams[stream_id].end_offset == 20
    assert [each.start_offset for each in client.find_objects(stream_id, 5, 8, 9)] == [5, 6, 7]
    versions = [delta.version for delta in deltas]
    assert versions == sorted(set(versions)) and versions[-1] == client.image.version
    await until(lambda: (tmp_path / "snapshot").exists())
    rows = {name: dict(table) for name, table in client.image.rows()}
    await client.close()
    await node.close()
    heard = len(deltas)
    node, client = await local_world(tmp_path, settings=settings)
    assert len(deltas) == heard
    for name, table in client.image.rows():
        assert name == "cluster" or name == "brokers" or table == rows[name], name
    assert [each.start_offset for each in client.find_objects(stream_id, 5, 8, 9)] == [5, 6, 7]
    await client.close()
    await node.close()


async def test_a_command_whose_effect_does_not_reach_the_local_metadata_in_time_is_not_told_as_one_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who tries again, as who takes a snapshot does, would meet what it did itself."""
    node, client = await world(tmp_path, budget_s=1.0)
    with monkeypatch.context() as patched:
        patched.setattr(node.feed, "after", lambda _version: [])
        with pytest.raises(OutcomeUnknown, match="did not reach version"):
            await client.put_kv("key", b"value")
    assert node.image.kv["key"] == b"value"
    await until(lambda: client.image.kv.get("key") == b"value")
    await client.close()
    await node.close()


def test_a_listener_of_a_feed_hears_what_a_snapshot_changed() -> None:
    feed = DeltaFeed(finds_objects=True)
    heard: list[Delta] = []
    remove = feed.listen(heard.append)
    feed.append(Delta(1, [RowChange("kv", "a", b"1"), RowChange("kv", "b", b"1")]))
    newer = feed.new_image()
    newer.apply(Delta(5, [RowChange("kv", "b", b"2"), RowChange("kv", "c", b"3")]))
    feed.reset(newer)
    assert heard[1] == Delta(5, [RowChange("kv", "a", None), RowChange("kv", "b", b"2"), RowChange("kv", "c", b"3")])
    remove()
    feed.append(Delta(6, [RowChange("kv", "c", None)]))
    assert len(heard) == 2 and feed.image.kv == {"b": b"2"}


@pytest.mark.parametrize("make_world", [world, local_world])
async def test_a_call_returns_when_the_local_image_has_its_effect(tmp_path: Path, make_world: MakeWorld) -> None:
    node, client = await make_world(tmp_path)
    assert len(client.image.cluster_id) == 22
    await register(client)
    assert client.image.brokers[0].alive
    epoch = (await client.elect(0, 0)).master_epoch
    assert client.image.replica_sets[0].master_epoch == epoch
    topic = await client.create_topic("t", 2, {"retention.ms": "1"})
    assert client.image.topic("t") == topic and len(client.image.partitions(topic.id)) == 2
    partition = client.image.partitions(topic.id)[0]
    assert client.image.leader(partition) == (0, epoch)
    stream_id = partition.first_stream
    await client.open_streams(0, epoch, [(stream_id, epoch)])
    await commit(client, epoch, stream_id, 0, 5)
    assert [each.end_offset for each in client.find_objects(stream_id, 0, 9, 9)] == [5]
    assert client.committed_wal_offset(0) == 1 and client.committed_wal_offset(9) == 0
    await client.trim_stream(0, epoch, stream_id, epoch, 5)
    assert client.image.streams[stream_id].start_offset == 5
    await client.close_streams(0, epoch, [(stream_id, epoch)])
    assert (await client.create_partitions(topic.id, 3)).partitions == 3
    await client.alter_topic_configs(topic.id, {"retention.ms": None})
    await client.alter_configs("cluster", "", {"a": "b"})
    assert client.image.configs == {("cluster", ""): {"a": "b"}}
    await client.put_kv("k", b"v")
    assert await client.get_kv("k") == b"v"
    await client.delete_kv("k")
    assert await client.get_kv("k") is None
    assert await client.allocate_producer_ids(0, 1) == (0, 1000)
    await client.delete_topic(topic.id)
    assert client.image.topic("t") is None
    await client.close()
    await node.close()


async def test_refusals_arrive_as_the_same_class_with_their_facts(tmp_path: Path) -> None:
    node, client = await world(tmp_path)
    await register(client)
    epoch = (await client.elect(0, 0)).master_epoch
    topic = await client.create_topic("t", 1, {})
    with pytest.raises(TopicExists):
        await client.create_topic("t", 1, {})
    with pytest.raises(InvalidPartitions):
        await client.create_partitions(topic.id, 1)
    stream_id = client.image.partitions(topic.id)[0].first_stream
    await client.open_streams(0, epoch, [(stream_id, epoch)])
    with pytest.raises(CommitGap) as gap:
        await commit(client, epoch, stream_id, 3, 5)
    assert gap.value.stream_id == stream_id
    assert client.image.streams[stream_id].quarantined  # visible here, now
    await client.release_stream(stream_id)
    await client.close()
    await node.close()


def test_every_error_survives_the_wire() -> None:
    gap = CommitGap("text", stream_id=7, hint="do this")
    back = from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(gap)), type=type(to_wire(gap))))
    assert isinstance(back, CommitGap) and (back.stream_id, back.hint, back.kafka_code) == (7, "do this", 56)
    unknown = msgspec.structs.replace(to_wire(gap), name="FromTheFuture")
    assert isinstance(from_wire(unknown), RemoteError) and "FromTheFuture" in str(from_wire(unknown))


async def test_metadata_and_answers_survive_a_restart_of_the_controller(tmp_path: Path) -> None:
    node, client = await world(tmp_path, settings=ControllerSettings(snapshot_entries=20))
    port = node.address[1]
    await register(client)
    await client.elect(0, 0)
    for number in range(50):
        await client.put_kv(f"k{number}", b"v")
    await node.close()
    late = asyncio.create_task(client.put_kv("late", b"v"))  # asked while the controller is down
    await asyncio.sleep(0.1)
    assert not late.done()
    node = make_node(tmp_path, settings=ControllerSettings(snapshot_entries=20, port=port))
    await node.start()
    await late
    assert len(client.image.kv) == 52 and len(node.image.kv) == 52, "and the feature levels of the broker"
    await until(lambda: client.image.brokers[0].alive)
    await client.close()
    await node.close()


async def test_a_retried_command_takes_effect_once(tmp_path: Path) -> None:
    node, client = await world(tmp_path)
    _, protocol = await TcpNetwork().connect(RpcConnection, *node.address, timeout_s=5)
    assert isinstance(protocol, RpcConnection)
    command = msgspec.Raw(c.encode(c.PrepareObjects(1, 60_000)))
    params = CommandParams("somebody", 1, 1, command)
    answers = await asyncio.gather(*(protocol.call("command", params, 5) for _ in range(10)))
    assert len({bytes(answer) for answer in answers}) == 1
    assert len(node.image.objects) == 1
    await protocol.close()
    await client.close()
    await node.close()


async def test_a_controller_of_another_cluster_at_the_same_address_is_neither_asked_nor_kept_alive_for(
    tmp_path: Path,
) -> None:
    """Its ids of objects are in use in the caller's bucket: what was written under them would replace what is there."""
    network = KeptNetwork()
    node, client = await world(tmp_path / "a", network=network, budget_s=1)
    other, its = await world(tmp_path / "b")
    epoch = await register(client)
    assert await register(its) == epoch
    used = await client.prepare_objects(1, 60_000)
    while other.image.version <= client.image.version:  # it knows enough to believe itself
        await its.put_kv("key", b"%d" % other.image.version)
    await its.close()
    await until(lambda: not other.hears(0) and not other.image.brokers[0].alive)
    network.redirected[node.address] = other.address
    network.lose()
    before = other.image.version
    with pytest.raises(OutcomeUnknown, match=f"the caller belongs to cluster {node.image.cluster_id}"):
        await client.prepare_objects(1, 60_000)
    with pytest.raises(OtherCluster):
        await client.unknown_objects([used])
    with pytest.raises(OtherCluster):
        await client.transfer_leadership(None)
    assert (other.image.version, other.image.objects, other.hears(0)) == (before, {}, False)
    network.redirected.clear()
    network.lose()
    assert await client.prepare_objects(1, 60_000) == used + 1
    await client.close()
    await node.close()
    await other.close()


async def test_a_command_is_not_sent_again_by_a_process_that_was_stopped_for_longer_than_its_budget(
    tmp_path: Path,
) -> None:
    """The controllers may have forgotten its result: it would take effect again, over what came after it."""
    sent: list[str] = []

    class LostAnswers(RpcConnection):
        async def call(self, method: str, params: Any, timeout_s: float, cluster_id: str = "") -> msgspec.Raw:
            answer = await super().call(method, params, timeout_s, cluster_id)
            if method == "command":
                sent.append(method)
                raise Unavailable("the answer is lost")
            return answer

    class LossyNetwork(TcpNetwork):
        async def connect(self, factory: Any, host: str, port: int, *, timeout_s: float) -> Any:
            return await super().connect(LostAnswers, host, port, timeout_s=timeout_s)

    class StoppedClock(SystemClock):
        stopped_s = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.stopped_s

        async def sleep(self, seconds: float) -> None:
            self.stopped_s += 7_200 if sent else 0
            await super().sleep(seconds)

    node = make_node(tmp_path)
    await node.start()
    await node.wait_active(60)
    client = ControllerClient([node.address], LossyNetwork(), StoppedClock(), random.Random())
    await client.start()
    with pytest.raises(OutcomeUnknown):
        await client.put_kv("key", b"value")
    assert len(sent) == 1
    await client.close()
    await node.close()


async def test_clients_may_not_act_as_the_controller(tmp_path: Path) -> None:
    node, client = await world(tmp_path)
    with pytest.raises(InvalidInput):
        await send(node, c.SetBrokerAlive(0, 1, False))
    with pytest.raises(InvalidInput):
        await ask(node, "no such method", None)
    with pytest.raises(TidelogError):
        await ask(node, "command", ["garbage"])
    with pytest.raises(Fenced):
        await ask(node, "poll", PollParams(0, 0, "another-cluster", DELTA_VERSION))
    with pytest.raises(InvalidInput, match="upgrade"):
        await ask(node, "poll", [0, 0, client.image.cluster_id])  # as older processes ask
    assert (await client.status())["active"] is True
    await client.close()
    await node.close()


async def test_a_closed_connection_makes_a_broker_dead_at_once_and_a_heartbeat_revives_it(tmp_path: Path) -> None:
    network = KeptNetwork()
    node, client = await world(tmp_path, network=network, settings=ControllerSettings(session_timeout_ms=3_600_000))
    watcher = make_client(node.address)
    await watcher.start()
    await register(client)
    await until(lambda: node.hears(0) and 0 in watcher.image.brokers)
    with pytest.raises(BrokerIdInUse):
        await register(watcher, check_code="another directory")
    seen: list[bool] = []
    watcher.subscribe(lambda delta: seen.extend(each.record.alive for each in delta.of("brokers")))
    network.lose()
    await until(lambda: seen == [False, True])
    await client.close()
    await until(lambda: not watcher.image.brokers[0].alive)
    assert await register(watcher, check_code="another directory") == 2
    await watcher.close()
    await node.close()


@pytest.mark.usefixtures("quick_rounds")
async def test_a_silent_broker_is_dead_after_the_session_timeout(tmp_path: Path) -> None:
    node, client = await world(tmp_path, settings=ControllerSettings(session_timeout_ms=300))
    await send(node, c.RegisterBroker(5, "c", "a", "h", 1, "", "", newest_level=NEWEST))  # and no heartbeats
    await until(lambda: 5 in client.image.brokers and not client.image.brokers[5].alive)
    await client.close()
    await node.close()


@pytest.mark.usefixtures("quick_rounds")
async def test_a_broker_that_cannot_measure_its_load_is_alive(tmp_path: Path) -> None:
    node, client = await world(tmp_path, settings=ControllerSettings(session_timeout_ms=300))
    measured: list[float] = []
    dead: list[BrokerRecord] = []

    def measure() -> BrokerLoad:
        measured.append(asyncio.get_running_loop().time())
        raise RuntimeError("a clock that went back")

    client.subscribe(lambda delta: dead.extend(each.record for each in delta.of("brokers") if not each.record.alive))
    client.measure_load(measure)
    client.report_not_uploaded(lambda: 1 // len(dead))
    await register(client)
    await until(lambda: bool(dead) or (len(measured) > 1 and measured[-1] > measured[0] + 1))
    assert not dead
    await client.close()
    await node.close()


async def test_a_newer_process_fences_the_older_ones_heartbeats(tmp_path: Path) -> None:
    node, client = await world(tmp_path)
    fenced: list[TidelogError] = []
    client.on_fenced(fenced.append)
    await register(client)
    newer = make_client(node.address)
    await newer.start()
    assert await register(newer, incarnation="b") == 2
    await until(lambda: len(fenced) == 1)
    assert isinstance(fenced[0], StaleBrokerEpoch)
    await newer.close()
    await client.close()
    await node.close()


@pytest.mark.parametrize("registered", [True, False])
async def test_a_controller_that_was_deposed_unawares_fences_no_newer_process(tmp_path: Path, registered: bool) -> None:
    """Its disk hangs, say: its metadata are those of before, and the broker has registered with the next one."""
    node, client = await world(tmp_path)
    if registered:
        await register(client)
        await client.close()
    version = node.image.version
    assert node.is_active
    newer = HeartbeatParams(0, 2 if registered else 1, version=version + 9)
    assert msgspec.msgpack.decode(await ask(node, "heartbeat", newer)) is None
    older = msgspec.structs.replace(newer, registration_epoch=1, version=version - 1)
    if registered:
        assert msgspec.msgpack.decode(await ask(node, "heartbeat", older)) is not None
    else:
        with pytest.raises(StaleBrokerEpoch):  # the broker was removed
            await ask(node, "heartbeat", older)
    await client.close()
    await node.close()


async def test_waiting_for_a_controller_tells_each_kind_of_failure_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node, client = await world(tmp_path)
    address = node.address
    await client.close()
    await node.close()
    attempts = 0

    class Counted(TcpNetwork):
        async def connect(self, *arguments: Any, **named: Any) -> Any:
            nonlocal attempts
            attempts += 1
            return await super().connect(*arguments, **named)

    caplog.set_level("INFO", "tidelog.controller.client.client")
    waiting = ControllerClient([address, address, address], Counted(), SystemClock(), random.Random(1))
    start = asyncio.create_task(waiting.start())
    await until(lambda: attempts >= 4)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await waiting.close()
    assert [record.message for record in caplog.records] == ["waiting for the controller"]


async def test_a_follower_too_far_behind_reloads_and_sees_the_difference_as_one_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = KeptNetwork()
    node, client = await world(tmp_path, network=network, feed=FeedLimits(ring_deltas=4, chunk_rows=3))
    for number in range(10):
        await client.put_kv(f"k{number}", b"old")
    deltas: list[Delta] = []
    client.subscribe(deltas.append)
    writer = make_client(node.address)
    await writer.start()
    assert writer.image.kv == client.image.kv  # loaded in chunks
    network.open.clear()
    network.lose()
    behind = client.image.version
    await writer.delete_kv("k0")
    for number in range(10, 20):
        await writer.put_kv(f"k{number}", b"new")
    assert client.image.version == behind
    deltas.clear()
    network.open.set()
    await client.wait_version(writer.image.version)
    assert client.image.kv == node.image.kv
    assert {each.key for each in deltas[0].of("kv")} == {"k0", *(f"k{number}" for number in range(10, 20))}
    await writer.close()
    await client.close()
    await node.close()


async def test_the_active_controller_tells_which_object_ids_it_does_not_know(tmp_path: Path) -> None:
    consensus = Deposable()
    node, client = await world(tmp_path, consensus=consensus)
    first = await client.prepare_objects(3, 60_000)
    asked = [first, first + 1, first + 2, first + 3, first + 99]
    assert await client.unknown_objects(asked) == [first + 3, first + 99]
    with pytest.raises(NotController, match="older"):
        await node.unknown_objects([first], node.image.version + 1)
    with pytest.raises(InvalidInput, match="at most"):
        await client.unknown_objects(range(10_001))
    consensus.depose()
    with pytest.raises(NotController):
        await node.unknown_objects([first])
    await client.close()
    await node.close()


@pytest.mark.usefixtures("quick_rounds")
async def test_the_lifecycle_expires_deletes_and_then_forgets(tmp_path: Path) -> None:
    deleted: list[int] = []
    fails = [True]

    async def delete(object_ids: Any) -> None:
        if fails.pop() if fails else False:
            raise Unavailable("the bucket is away")
        deleted.extend(object_ids)

    node, client = await world(tmp_path, delete_objects=delete, delete_delay_ms=50)
    await client.prepare_objects(3, 50)
    await until(lambda: not client.image.objects)
    assert sorted(deleted) == [1, 2, 3]
    await client.close()
    await node.close()


async def test_a_destroyed_object_is_deleted_when_every_broker_has_newer_metadata(
    tmp_path: Path, quick_rounds: float
) -> None:
    deleted: dict[int, int] = {}

    async def delete(object_ids: Any) -> None:
        deleted.update(dict.fromkeys(object_ids, node.status()["read_versions"]["7"]))

    node, client = await world(tmp_path, delete_objects=delete, delete_delay_ms=50)
    reader = make_client(node.address, heartbeat_interval_s=3_600)
    await reader.start()
    await register(reader, broker_id=7)  # one heartbeat, and then it is silent
    await until(lambda: node.hears(7))
    await client.prepare_objects(3, 50)
    await until(lambda: {one.state for one in client.image.objects.values()} == {ObjectState.DESTROYED})
    destroyed_at = {one.id: one.destroyed_at for one in client.image.objects.values()}
    rounds_s = SystemClock().monotonic() + 8 * quick_rounds
    await until(lambda: SystemClock().monotonic() > rounds_s)
    assert not deleted, "broker 7 may still read by the metadata that it told"
    await reader.close()
    again = make_client(node.address, heartbeat_interval_s=0.05)
    await again.start()
    await register(again, broker_id=7, incarnation="b")
    await until(lambda: not client.image.objects)
    assert deleted.keys() == destroyed_at.keys()
    assert all(version >= destroyed_at[each] for each, version in deleted.items())
    for one in (again, client, node):
        await one.close()


async def test_a_broker_without_a_controller_knows_that_its_metadata_is_old(tmp_path: Path) -> None:
    node, client = await world(tmp_path, budget_s=0.3, settings=ControllerSettings(read_grace_ms=1_000))
    client.check_current()  # a tool that is no broker has no limit
    await client.catch_up()
    await register(client)
    await until(lambda: client.balance is not None)
    client.check_current()
    await node.close()

    def is_old() -> bool:
        try:
            client.check_current()
        except Unavailable:
            return True
        return False

    await until(is_old)
    with pytest.raises(Unavailable, match="no active controller"):
        client.check_current()
    await client.close()


async def test_metadata_that_stay_behind_what_heartbeats_tell_are_asked_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "POLL_GRACE_S", 3_600.0)  # a silent poll ends by nothing else
    node, other = await world(tmp_path)
    network = KeptNetwork()
    client = make_client(node.address, network=network, heartbeat_interval_s=0.05)
    await client.start()
    before = len(network.transports)
    await register(client)
    await until(lambda: len(network.transports) > before)  # the heartbeats have their own
    for one in network.transports[:before]:
        one.pause_reading()  # as after a cut of the network: nobody is told, and nothing arrives
    await other.put_kv("key", b"value")
    await until(lambda: "key" in client.image.kv)
    for each in (client, other, node):
        await each.close()


def test_a_followed_controller_counts_as_silent_only_without_any_progress() -> None:
    watch, now_s = BehindWatch(), 0.0

    def is_stuck(version: int, told: int, after_s: float) -> bool:
        nonlocal now_s
        now_s += after_s
        return watch.is_stuck(version, told, now_s)

    assert not is_stuck(5, 5, 10.0), "it has everything"
    assert not is_stuck(5, 7, 10.0) and not is_stuck(5, 7, BEHIND_S / 2)
    assert not is_stuck(6, 9, BEHIND_S), "it follows, and is slow"
    assert not is_stuck(6, 9, BEHIND_S / 2)
    assert is_stuck(6, 7, BEHIND_S), "one that was deposed tells an old version, and takes nothing back"
    assert not is_stuck(6, 9, BEHIND_S / 2), "the next one gets its time"
    assert not is_stuck(6, 0, BEHIND_S / 4), "an older controller tells no version"
    assert is_stuck(6, 9, BEHIND_S)
    assert not is_stuck(9, 9, BEHIND_S) and not is_stuck(9, 7, BEHIND_S), "it has everything"


@pytest.mark.usefixtures("quick_rounds")
async def test_a_bucket_that_does_not_answer_delays_no_look_at_who_lives(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def delete(_object_ids: Any) -> None:
        asked.set()
        await asyncio.Event().wait()  # the bucket never answers

    node, client = await world(tmp_path, delete_objects=delete, delete_delay_ms=10)
    await client.prepare_objects(1, 10)
    await asked.wait()
    other = make_client(node.address, heartbeat_interval_s=0.05)
    await other.start()
    await register(other, broker_id=7)
    await until(lambda: node.hears(7))
    await other.close()
    await until(lambda: not client.image.brokers[7].alive)
    await client.close()
    await node.close()


async def test_without_a_controller_calls_fail_within_their_budget_and_start_waits(tmp_path: Path) -> None:
    node, client = await world(tmp_path, budget_s=0.3)
    address = node.address
    await node.close()
    with pytest.raises(OutcomeUnknown):
        await client.put_kv("k", b"v")
    await client.close()
    waiting = make_client(address)
    start = asyncio.create_task(waiting.start())
    await asyncio.sleep(0.05)
    assert not start.done()
    node = make_node(tmp_path, settings=ControllerSettings(port=address[1]))
    await node.start()
    await start
    await waiting.close()
    await node.close()
    with pytest.raises(NotController):
        await node.wait_active(0.01)


async def test_many_calls_at_once_all_take_effect(tmp_path: Path) -> None:
    node, client = await world(tmp_path)
    await asyncio.gather(*(client.put_kv(f"k{number}", b"v") for number in range(300)))
    assert len(client.image.kv) == 300
    firsts = await asyncio.gather(*(client.prepare_objects(3, 60_000) for _ in range(100)))
    assert sorted(firsts) == list(range(1, 301, 3))
    await client.close()
    await node.close()


async def test_a_controller_whose_disk_fails_says_so_and_stops_acting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    node, client = await world(tmp_path, on_failed=failures.append, budget_s=0.3)

    def fail(fd: int) -> None:
        raise OSError(5, "I/O error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OutcomeUnknown):
        await client.put_kv("k", b"v")
    monkeypatch.undo()
    assert len(failures) == 1 and not node.is_active and not client.image.kv
    await client.close()
    await node.close()


async def test_a_command_that_waits_long_for_its_answer_is_not_forgotten_for_its_successors(tmp_path: Path) -> None:
    slow_until = asyncio.Event()

    class SlowFirst(RpcConnection):
        async def call(self, method: str, params: Any, timeout_s: float, cluster_id: str = "") -> msgspec.Raw:
            answer = await super().call(method, params, timeout_s, cluster_id)
            if method == "command" and params.sequence == 1 and not slow_until.is_set():
                await slow_until.wait()  # it took effect
                raise Unavailable("the answer is lost")
            return answer

    class SlowNetwork(TcpNetwork):
        async def connect(self, factory: Any, host: str, port: int, *, timeout_s: float) -> Any:
            return await super().connect(SlowFirst, host, port, timeout_s=timeout_s)

    node, client = await world(tmp_path, network=SlowNetwork())
    slow = asyncio.create_task(client.prepare_objects(1, 60_000))
    others = [asyncio.create_task(client.prepare_objects(1, 60_000)) for _ in range(300)]
    await until(lambda: sum(task.done() for task in others) >= 90)
    slow_until.set()
    assert sorted([await slow, *await asyncio.gather(*others)]) == list(range(1, 302))
    await client.close()
    await node.close()


async def test_commands_leave_a_silent_controller_when_the_image_names_another_active_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ATTEMPT_OF_MANY_S", 60.0)  # it does not leave by itself
    node = make_node(tmp_path)
    await node.start()
    await node.wait_active(60)
    ends: list[asyncio.Event] = []

    class Silent(asyncio.Protocol):
        def __init__(self) -> None:
            self.ended = asyncio.Event()
            ends.append(self.ended)

        def connection_lost(self, exc: Exception | None) -> None:
            self.ended.set()

    silent = await asyncio.get_running_loop().create_server(Silent, "127.0.0.1", 0)
    paused = silent.sockets[0].getsockname()[:2]
    feed, network = DeltaFeed(), KeptNetwork()
    feed.append(Delta(1, [RowChange("cluster", "", node.image.cluster)]))
    network.redirected[paused] = node.address  # it is active, and answers
    client = make_client(paused, node.address, network=network, local=feed, budget_s=50)
    await client.start()
    network.redirected.clear()
    network.lose()
    asking = asyncio.create_task(client.put_kv("k", b"v"))
    await until(lambda: bool(ends))
    cluster = node.image.cluster
    assert cluster is not None
    members = ((0, "{}:{}".format(*node.address)), (7, "{}:{}".format(*paused)))
    named = msgspec.structs.replace(cluster, controllers=members, active_term=cluster.active_term + 1)
    feed.append(Delta(node.image.version, [RowChange("cluster", "", named)]))  # not newer than what is asked has
    await until(lambda: node.image.kv == {"k": b"v"})
    feed.append(Delta(1_000, []))
    await asking
    await client.close()
    silent.close()
    await silent.wait_closed()
    await node.close()
    await asyncio.gather(*(ended.wait() for ended in ends))


@pytest.mark.parametrize("silent", [False, True], ids=["while-it-connects", "in-the-handshake"])
async def test_a_call_leaves_the_controller_that_it_is_connecting_to_when_another_is_preferred(
    tmp_path: Path, *, silent: bool
) -> None:
    ends: list[asyncio.Event] = []

    class Silent(asyncio.Protocol):
        def __init__(self) -> None:
            ends.append(asyncio.Event())
            self._end = ends[-1]

        def connection_lost(self, exc: Exception | None) -> None:
            self._end.set()

    server = await asyncio.get_running_loop().create_server(Silent, "127.0.0.1", 0)
    paused = server.sockets[0].getsockname()[:2]
    node = make_node(tmp_path)
    await node.start()
    await node.wait_active(60)
    network = KeptNetwork()
    if not silent:
        network.open.clear()
    channel = RpcChannel(
        [paused, node.address], network, Credentials(b"a secret of enough bytes", 1) if silent else None
    )
    call = asyncio.create_task(channel.call("status", None, 60))
    await until(lambda: bool(ends) if silent else network.waiting > 0)
    channel.prefer(node.address)
    network.open.set()
    with pytest.raises(Unavailable, match="not to be asked any more"):
        await call
    assert channel.endpoint == node.address
    if not silent:
        await channel.call("status", None, 60)
    await channel.close()
    server.close()
    await server.wait_closed()
    await node.close()
    await asyncio.gather(*(ended.wait() for ended in ends))


async def test_a_controller_that_keeps_ending_is_a_problem_between_its_ends_too(tmp_path: Path) -> None:
    node, client = await world(tmp_path)
    host, port = node.address
    await register(client)
    await until(lambda: client.balance is not None)
    for _ in range(2):
        assert client.problems() == []
        await node.close()
        await until(lambda: client.balance is None)
        node = make_node(tmp_path, settings=ControllerSettings(port=port))
        await node.start()
        await node.wait_active(60)
        await until(lambda: client.balance is not None)
    await until(lambda: [f"controller {host}:{port} was lost 2 times" in one for one in client.problems()] == [True])
    await client.close()
    await node.close()


async def test_an_unanswered_command_and_silent_heartbeats_are_problems_until_a_controller_answers(
    tmp_path: Path,
) -> None:
    node, client = await world(tmp_path)
    port = node.address[1]
    await register(client)
    now = SystemClock().monotonic
    await until(lambda: client.balance is not None)
    assert not client.health.problem(now())
    await node.close()
    asking = asyncio.create_task(client.prepare_objects(1, 60_000))
    await until(lambda: "no answer" in client.health.problem(now()))
    await until(lambda: any("no active controller has answered" in one for one in client.problems()))
    node = make_node(tmp_path, settings=ControllerSettings(port=port))
    await node.start()
    await asking
    assert not client.health.problem(now())
    await until(lambda: client.problems() == [])
    await client.close()
    await node.close()
