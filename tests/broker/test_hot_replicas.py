"""Replicas of one set with real sockets and disks: what they lose, take back, refuse, and wait for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.storage.wal_harness import until
from tests.support.fake_objects import FakeObjects
from tests.support.held import Held
from tests.support.hot_replicas import LIMITS, POLICY, SECRET, Broker, HotSet, Proxy, TlsHotSet
from tests.support.hung_disk import hung_syncs
from tests.support.loops import BOTH_LOOPS
from tidelog.broker.replication import follower as follower_module
from tidelog.broker.replication.connection import connect_wal
from tidelog.broker.replication.follower import ReplicaFollower
from tidelog.broker.replication.inputs import (
    AlterRefused,
    MasterTarget,
    NotEnoughReplicas,
    ReplicationWorld,
)
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, Fenced, InvalidInput, Unavailable
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.inputs import HandedWal, ReplicaSetData
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.frames import Ack, FollowerHello, Frame, Goodbye, GoodbyeCode, Records, Welcome
from tidelog.storage.replication.pace import BURST_S, CatchUpPace
from tidelog.storage.settings import StorageSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import WalFailed, WalRecord
from tidelog.storage.wal.disk.wal import DiskWal

LOOPS = BOTH_LOOPS


@pytest.fixture(params=["plain", "tls"])
async def hot(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[HotSet]:
    one = HotSet(tmp_path) if request.param == "plain" else TlsHotSet(tmp_path)
    yield one
    await one.close()


async def test_three_replicas_hold_the_same_bytes_and_a_quorum_confirms_them(hot: HotSet) -> None:
    master = await hot.start_all()
    end = await hot.write(master, 300)
    await hot.confirmed(master)
    await hot.same()
    assert master.confirmed == sorted(set(master.confirmed)) and master.confirmed[-1] == end
    assert master.wal.confirm_offset == end
    await until(lambda: hot.brokers[2].wal.confirm_offset == end)  # by a heartbeat
    assert master.master.status()["in_sync"] == [1, 2, 3]


async def test_a_killed_follower_is_not_waited_for_and_catches_up_when_it_is_back(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.write(master, 50)
    await hot.kill(3)
    killed = asyncio.get_running_loop().time()
    await hot.write(master, 900)  # more than is kept in memory for sending
    await hot.confirmed(master)
    await until(lambda: len(hot.authority.configuration.members) == 2)
    # Who had everything a moment ago may join at once.
    await until(lambda: asyncio.get_running_loop().time() > killed + POLICY.slave_timeout_s)
    await hot.start(3)
    await hot.let_follow()
    await hot.same()
    await until(lambda: len(hot.authority.configuration.members) == 3)
    ends, confirm_offset = hot.authority.told
    assert {each.broker_id: end for each, end in ends.items()} == dict.fromkeys((1, 2, 3), master.wal.end_offset)
    assert confirm_offset == master.wal.end_offset, "everything was confirmed before the third one came"


@pytest.mark.parametrize("brokers", [2, 3], ids=["one promise elects", "two promises elect"])
async def test_the_controllers_hear_of_all_ends_while_nothing_else_changes(tmp_path: Path, brokers: int) -> None:
    """Otherwise old copies of disks would be elected, while another one with everything is away."""
    hot = HotSet(tmp_path, policy=replace(POLICY, total_replicas=brokers), brokers=brokers)
    hot.authority.reports_s = 0.02
    try:
        master = await hot.start_all()
        number = hot.authority.configuration.number
        for _ in range(3):
            end = await hot.write(master, 30)
            await hot.confirmed(master)
            await until(lambda end=end: {*hot.authority.told[0].values()} == {end})  # type: ignore[misc]
        assert hot.authority.configuration.number == number
    finally:
        await hot.close()


async def test_ends_that_a_loss_of_power_may_take_back_are_not_told_where_several_disks_decide(tmp_path: Path) -> None:
    hot = HotSet(tmp_path)
    hot.limits, hot.authority.reports_s = replace(LIMITS, tells_ends=False), 0.02
    asked: list[SetConfiguration] = []
    try:
        master = await hot.start_all()
        hot.authority.trouble = asked.append
        await hot.write(master, 30)
        await hot.confirmed(master)
        await hot.kill(3)
        await until(lambda: len(hot.authority.configuration.members) == 2)
        assert not any(len(each.members) == 3 for each in asked), "what is in force was asked for again"
    finally:
        await hot.close()


async def test_a_follower_with_an_empty_disk_is_another_replica_and_is_filled(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.write(master, 200)
    await hot.confirmed(master)
    await hot.kill(2, wipe=True)
    await hot.start(2)
    await hot.let_follow()
    await hot.same()
    members = {("wal-1"), ("wal-2-again"), ("wal-3")}
    await until(lambda: {each.wal_id for each in hot.authority.configuration.members} == members)


async def elected_beside_a_dirty_tail(hot: HotSet) -> Broker:
    """Broker 1, which has ended, has 30 records that nobody has confirmed, behind the 40 that all have; 3 leads."""
    old = await hot.start_all()
    await hot.write(old, 40)
    await hot.confirmed(old)
    await hot.same()
    for broker_id in (2, 3):
        await hot.kill(broker_id)
    common = old.wal.end_offset
    await hot.write(old, 30)
    await until(lambda: old.wal.durable_offset == old.wal.end_offset)
    assert old.master.confirm_offset == common, "alone it confirms nothing"
    await hot.kill(1)
    for broker_id in (2, 3):
        await hot.start(broker_id)
    return await hot.elect(3)


async def test_a_dirty_tail_is_cut_and_the_new_masters_bytes_follow(hot: HotSet) -> None:
    new = await elected_beside_a_dirty_tail(hot)
    await hot.write(new, 5)
    await hot.confirmed(new)
    back = await hot.start(1)
    assert back.wal.end_offset > new.wal.end_offset
    await hot.let_follow()
    await hot.same()
    assert len(back.replica.tail.records) == 45


async def test_of_what_is_committed_only_what_is_known_to_be_confirmed_is_kept(hot: HotSet) -> None:
    new = await elected_beside_a_dirty_tail(hot)
    back = await hot.start(1)
    await back.replica.follow(hot.target(new)._replace(port=1))  # it is cut off from its master, not from the metadata
    assert len(back.replica.tail.records) == 70
    back.replica.note_committed(back.wal.end_offset)  # the new master's own records, up to the same WAL offset
    await until(lambda: len(back.replica.tail.records) == 0)
    kept = back.replica.tail.records.kept(1, 0, -1)
    assert kept is None or kept.end_offset <= 40


async def test_who_is_elected_without_confirmed_bytes_reads_them_of_the_bucket(hot: HotSet) -> None:
    new = await elected_beside_a_dirty_tail(hot)
    await hot.write(new, 10)
    await hot.confirmed(new)
    objects = FakeObjects(committed={1: new.wal.end_offset}, ends={1: 50})
    back = await hot.start(1)
    for broker_id in (2, 3):
        await hot.kill(broker_id)
    back.replica.note_committed(objects.committed[1])
    hot.authority.epoch += 1
    alone = SetConfiguration(hot.authority.configuration.number + 1, frozenset([WalReplica(1, hot.wal_ids[1])]), 1)
    hot.authority.configuration = alone  # an operator's command
    master = await back.replica.lead(hot.authority.epoch, alone)
    await until(lambda: master.confirm_offset == back.wal.end_offset)
    tail = back.replica.hand_over()
    handed = HandedWal(tail.records, tail.cache, master.confirm, master.gate)
    data = ReplicaSetData("cluster", 1, back.wal, MemoryObjectStore(), objects, handed=handed)
    storage = Storage(data, StorageSettings(), SystemClock(), random.Random(1))
    await storage.start(hot.authority.epoch)
    assert storage.open_stream(1, 1, 0, 50, 1) == 70
    assert storage.read_hot(1, 40, 70, 1 << 20) is None, "what it has at these offsets was never confirmed"
    assert len(storage.read_hot(1, 50, 70, 1 << 20) or []) == 20
    await storage.close(upload=False)


async def test_what_is_committed_while_a_wal_starts_over_makes_its_old_records_confirmed_ones_to_nobody(
    hot: HotSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = await elected_beside_a_dirty_tail(hot)
    await hot.write(new, 10)
    await hot.confirmed(new)
    committed = new.wal.end_offset
    back = await hot.start(1)
    assert back.wal.confirm_offset < committed < back.wal.end_offset
    back.replica.note_committed(back.wal.confirm_offset)  # its metadata are older than the master's
    new.replica.note_committed(committed)
    await until(lambda: hot.brokers[2].wal.confirm_offset == committed)
    await new.wal.trim(committed)
    held = Held(monkeypatch, DiskWal, "restart_at", after=True)
    await hot.let_follow()
    await until(held.reached.is_set)
    back.replica.note_committed(committed)
    held.go_on.set()
    await hot.same()
    kept = back.replica.tail.records.kept(1, 0, -1)
    assert kept is None or kept.end_offset <= 40


async def leave_behind(hot: HotSet) -> Broker:
    """Start all, end broker 3, and go on until the bucket has all that the others have; return the master."""
    master = await hot.start_all()
    await hot.write(master, 50)
    await hot.confirmed(master)
    await hot.same()
    await hot.kill(3)
    hot.committed = await hot.write(master, 600)
    await hot.confirmed(master)
    for broker in hot.brokers.values():
        broker.replica.note_committed(hot.committed)
    await master.wal.trim(hot.committed)
    return master


async def test_a_follower_that_is_behind_the_masters_first_byte_starts_over_there(hot: HotSet) -> None:
    master = await leave_behind(hot)
    await until(lambda: hot.brokers[2].wal.start_offset == hot.committed)
    await hot.write(master, 10)
    back = await hot.start(3)
    assert back.wal.end_offset < hot.committed
    await hot.let_follow()
    await hot.same()
    assert back.wal.start_offset == hot.committed and len(back.replica.tail.records) == 10


async def back_with_given_up_records(hot: HotSet, broker_id: int) -> Broker:
    """A broker that follows without its records that were given up, and has kept its files."""
    hot.given_up_from = 0
    back = await hot.start(broker_id)
    end = back.wal.end_offset
    await hot.let_follow()
    await hot.same()
    directory = hot.path / hot.wal_ids[broker_id]
    assert list(directory.glob(f"*.wal.replaced-*-{end}")), list(directory.iterdir())
    return back


async def test_records_that_were_given_up_are_kept_although_what_came_instead_is_in_the_bucket(hot: HotSet) -> None:
    """An operator elected another replica without them, and their disk comes back later."""
    await leave_behind(hot)
    back = await back_with_given_up_records(hot, 3)
    assert back.wal.start_offset == hot.committed


async def test_records_that_were_given_up_are_kept_although_their_replica_knows_nothing_of_their_confirmation(
    hot: HotSet,
) -> None:
    """What was confirmed last is told with the next frame, which a master that dies does not send."""
    new = await elected_beside_a_dirty_tail(hot)
    await hot.write(new, 5)
    await hot.confirmed(new)
    back = await back_with_given_up_records(hot, 1)
    assert len(back.replica.tail.records) == 45


async def failing_follower(back: Broker) -> ReplicaFollower:
    """The follower of a broker, once it has failed to follow."""
    await until(lambda: back.replica.follower is not None and back.replica.follower.failing_since is not None)
    assert back.replica.follower is not None
    return back.replica.follower


async def test_a_follower_whose_master_cannot_read_its_wal_fails_and_is_patient(
    hot: HotSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is welcomed each time: that is no success, or nobody would hear of a replica that is dead for good."""
    master = await hot.start_all()
    await hot.kill(3)
    end = await hot.write(master, 900)  # more than is kept in memory for sending
    await until(lambda: hot.brokers[2].wal.durable_offset == end)
    reads: list[int] = []

    async def read(offset: int, _max_bytes: int) -> None:
        reads.append(offset)
        raise CorruptData("a bit has flipped", hint="none")

    monkeypatch.setattr(master.wal, "read_raw", read)
    back = await hot.start(3)
    await hot.let_follow()
    follower = await failing_follower(back)
    began, seen = follower.failing_since, len(reads)
    await until(lambda: len(reads) >= seen + 10)
    assert follower.failing_since == began and "a bit has flipped" in follower.problem
    assert sum("cannot be read for a follower" in each.message for each in caplog.records) == 1
    monkeypatch.undo()
    await hot.same()
    await until(lambda: follower.failing_since is None and not follower.problem)


async def test_a_follower_that_has_all_of_its_master_is_not_failing_any_more_once_it_is_welcomed(
    hot: HotSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next frame is a heartbeat, and may take seconds."""
    master = await hot.start_all()
    end = await hot.write(master, 10)
    await until(lambda: hot.brokers[3].wal.durable_offset == end)
    await hot.kill(3)

    async def unreachable(*_args: object, **_kwargs: object) -> None:
        raise Unavailable("no way there")

    monkeypatch.setattr(follower_module, "connect_wal", unreachable)
    back = await hot.start(3)
    await hot.let_follow()
    follower = await failing_follower(back)
    monkeypatch.undo()
    await until(lambda: follower.is_following)
    assert follower.failing_since is None and not follower.problem


async def test_a_new_follower_receives_only_what_is_not_in_the_bucket(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.kill(3)
    hot.committed = await hot.write(master, 600)
    end = await hot.write(master, 10)
    await hot.confirmed(master)
    assert master.wal.start_offset == 0, "it has everything, and trims later"
    shutil.rmtree(hot.path / hot.wal_ids[3])
    new = await hot.start(3)
    assert new.wal.end_offset == 0
    await hot.let_follow()
    await until(lambda: new.wal.durable_offset >= end)
    assert new.wal.start_offset == hot.committed and len(new.replica.tail.records) == 10


async def test_a_follower_whose_metadata_are_behind_waits_for_them(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.write(master, 50)
    await hot.confirmed(master)
    await hot.same()
    await until(lambda: hot.brokers[3].wal.confirm_offset == master.wal.end_offset)
    await hot.kill(3)
    committed = await hot.write(master, 200)
    await hot.confirmed(master)
    master.replica.note_committed(committed)
    await master.wal.trim(committed)
    back = await hot.start(3)  # it does not know that anything is committed
    await hot.let_follow()
    follower = back.replica.follower
    assert follower is not None
    await until(lambda: "behind" in follower.problem)
    assert follower.stopped is None and not back.diverged
    back.replica.note_committed(committed)
    await hot.same()


async def test_the_bytes_of_a_zombie_master_are_refused_and_it_hears_of_the_new_epoch(hot: HotSet) -> None:
    zombie = await hot.start_all()
    await hot.write(zombie, 20)
    await hot.confirmed(zombie)
    await hot.same()
    confirmed = zombie.master.confirm_offset
    hot.authority.epoch += 1

    def unreachable(_wanted: SetConfiguration) -> None:
        raise Unavailable("no controller answers")

    hot.authority.trouble = unreachable  # otherwise they tell the zombie
    for broker_id in (2, 3):
        await hot.brokers[broker_id].replica.promise(hot.authority.epoch)
    await hot.write(zombie, 20)
    await until(lambda: zombie.wal.durable_offset == zombie.wal.end_offset)
    new = hot.brokers[2]
    await new.replica.lead(hot.authority.epoch, hot.authority.configuration)
    await hot.brokers[3].replica.follow(hot.target(new))
    stale = hot.target(zombie)._replace(epoch=hot.authority.epoch - 1)
    assert not await hot.brokers[3].replica.follow(stale)
    await hot.write(new, 20)
    await hot.confirmed(new)
    assert zombie.master.confirm_offset == confirmed
    # A follower of the new epoch that is sent to the zombie tells it.
    await hot.brokers[3].replica.follow(hot.target(zombie)._replace(epoch=hot.authority.epoch))
    follower = hot.brokers[3].replica.follower
    assert follower is not None
    await until(lambda: zombie.deposed)
    assert zombie.deposed == [hot.authority.epoch]
    with pytest.raises(Fenced):
        zombie.master.check_writable()
    with pytest.raises(Fenced):
        await zombie.master.confirm.wait(zombie.wal.end_offset)
    await hot.brokers[3].replica.follow(hot.target(new))
    await zombie.replica.follow(hot.target(new))
    await hot.same()


@pytest.mark.parametrize("fault", ["cut", "flip"])
async def test_torn_and_damaged_frames_end_the_connection_and_nothing_of_them_is_used(hot: HotSet, fault: str) -> None:
    master = await hot.start_all()
    rng = random.Random(fault)
    for _ in range(25):
        before = master.proxy.connections
        if fault == "cut":
            master.proxy.cut_after = rng.randrange(12_000)
        else:
            master.proxy.flip_after = rng.randrange(12_000)
        await hot.write(master, 20)
        await hot.confirmed(master)
        await until(lambda before=before: master.proxy.connections > before)  # type: ignore[misc]
    await hot.same()


async def test_a_follower_catches_up_at_its_pace_while_producers_are_answered(hot: HotSet) -> None:
    rate = 400_000
    hot.limits = replace(hot.limits, live_bytes=32 << 10)
    hot.pace = CatchUpPace(rate)
    master = await hot.start_all()
    loop = asyncio.get_running_loop()
    await hot.kill(3)
    killed = loop.time()
    await until(lambda: len(master.master.configuration.members) == 2)
    end = await hot.write(master, 600)
    await hot.confirmed(master)
    await until(lambda: loop.time() > killed + POLICY.slave_timeout_s)  # who was there until now counts as in sync
    began = loop.time()
    await hot.start(3)
    await hot.let_follow()
    slowest, paced = 0.0, False
    while hot.brokers[3].wal.durable_offset < end:
        asked = loop.time()
        await hot.write(master, 1)
        await hot.confirmed(master)
        slowest = max(slowest, loop.time() - asked)
        paced |= [each["paced"] for each in master.master.status()["followers"] if each["broker"] == 3] == [True]
        await asyncio.sleep(0.02)
    assert loop.time() - began >= (end - 2 * hot.limits.link.batch_bytes) / rate - BURST_S - 0.1
    assert paced and slowest < (loop.time() - began) / 2, slowest
    await hot.same()
    await until(lambda: master.master.status()["in_sync"] == [1, 2, 3])


async def test_a_follower_that_writes_wait_for_catches_up_as_fast_as_it_can(hot: HotSet) -> None:
    hot.limits = replace(hot.limits, live_bytes=32 << 10)
    hot.pace = CatchUpPace(1)
    master = await hot.start_all()
    await hot.kill(3)
    await until(lambda: len(master.master.configuration.members) == 2)
    await hot.write(master, 300)
    await hot.confirmed(master)
    await hot.kill(2)
    await until(lambda: bool(master.master.refusal()))
    await hot.start(3)
    await hot.let_follow()
    await until(lambda: not master.master.refusal())
    await hot.write(master, 5)
    await hot.confirmed(master)
    assert hot.brokers[3].wal.durable_offset == master.wal.end_offset


async def test_what_a_stranger_sends_reaches_no_replica(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.write(master, 5)
    await hot.same()
    host, port = master.listener.address
    for garbage in (b"TR" + bytes(200), b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n" * 100):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(garbage)
        with contextlib.suppress(OSError):
            await writer.drain()
            async with asyncio.timeout(10):
                assert not await reader.read()
        writer.close()
    assert master.door.waiting == 0 and not master.listener.connections
    await hot.write(master, 5)
    await hot.confirmed(master)


async def test_a_broker_with_another_secret_is_refused(hot: HotSet) -> None:
    hot.secrets[3] = b"another secret altogether"
    master = await hot.start_all()
    follower = hot.brokers[3].replica.follower
    assert follower is not None
    await until(lambda: "secret" in follower.problem)
    await hot.write(master, 20)
    await hot.confirmed(master)
    await hot.same(1, 2)
    assert hot.brokers[3].wal.end_offset == 0


async def test_a_proven_connection_that_names_no_set_or_another_broker_is_dropped(hot: HotSet) -> None:
    master = await hot.start_all()
    world = ReplicationWorld(hot.network_of(9), SystemClock(), random.Random(1), Credentials(SECRET, 9))
    target = MasterTarget(1, 1, *master.listener.address)
    hello = FollowerHello(0, 9, 1, False, -1, 0, 0, 0, "wal-9", ())

    async def answers(*frames: Frame) -> list[Frame]:
        connection = await connect_wal(world, target, max_body_bytes=1 << 20, timeout_s=5)
        got: list[Frame] = []
        lost = asyncio.Event()
        connection.on_frame, connection.on_lost = got.append, lost.set
        for frame in frames:
            connection.send(frame)
        async with asyncio.timeout(10):
            await lost.wait()
        return got

    assert await answers(Ack(1, 0)) == []
    assert await answers(hello._replace(broker_id=2)) == []
    (no_master,) = await answers(hello._replace(replica_set_id=7))
    assert isinstance(no_master, Goodbye) and no_master.code == GoodbyeCode.NOT_MASTER
    hot.authority.strangers.add(9)
    (no_member,) = await answers(hello)
    assert isinstance(no_member, Goodbye) and no_member.code == GoodbyeCode.NOT_MEMBER
    (no_member,) = await answers(hello._replace(promised_epoch=99))  # it deposes nobody: its promise is of no set here
    assert isinstance(no_member, Goodbye) and no_member.code == GoodbyeCode.NOT_MEMBER
    hot.authority.strangers.clear()
    (welcome,) = await answers(hello, Ack(0, 0), Ack(1, 99))
    assert isinstance(welcome, Welcome) and welcome.master_epoch == 1
    await hot.write(master, 5)
    await hot.confirmed(master)


@pytest.mark.processes  # real time-outs
async def test_a_follower_that_reads_nothing_is_sent_a_window_and_dropped_when_it_is_silent(hot: HotSet) -> None:
    master = await hot.start_all()
    world = ReplicationWorld(hot.network_of(9), SystemClock(), random.Random(1), Credentials(SECRET, 9))
    target = MasterTarget(1, 1, *master.listener.address)
    connection = await connect_wal(world, target, max_body_bytes=1 << 20, timeout_s=5)
    got: list[Frame] = []
    lost = asyncio.Event()
    connection.on_frame, connection.on_lost = got.append, lost.set
    connection.send(FollowerHello(0, 9, 1, False, -1, 0, 0, 0, "wal-9", ()))
    await until(lambda: got)
    connection.send(Ack(1, 0))
    await until(lambda: len(got) > 1)
    await hot.write(master, 600)
    await hot.confirmed(master)
    async with asyncio.timeout(10):
        await lost.wait()  # it acknowledges nothing, and is silent
    records = [frame for frame in got if isinstance(frame, Records)]
    sent = max(frame.offset + len(frame.body) for frame in records)
    window = hot.limits.link.window_bytes
    assert window - 2000 <= sent <= window + 2000 < master.wal.end_offset
    assert records[0].offset == 0


async def test_a_follower_with_nothing_to_receive_acknowledges_at_once(hot: HotSet) -> None:
    """It does not wait for a heartbeat: there is none here."""
    hot.limits = replace(hot.limits, link=replace(hot.limits.link, heartbeat_s=3600.0, silence_s=7200.0))
    master = await hot.start_all()
    await hot.write(master, 20)
    await hot.confirmed(master)
    await hot.same()
    await hot.kill(3)
    await until(lambda: master.master.status()["in_sync"] == [1, 2])
    end = master.wal.end_offset
    await hot.start(3)
    await hot.let_follow()
    await until(lambda: master.master.status()["in_sync"] == [1, 2, 3])
    assert master.wal.end_offset == end


@pytest.mark.processes  # real time-outs
async def test_a_follower_leaves_a_master_that_is_silent_and_connects_again(hot: HotSet) -> None:
    limits = hot.limits
    hot.limits = replace(limits, link=replace(limits.link, heartbeat_s=3600.0, silence_s=7200.0))
    await hot.start(1)
    hot.limits = replace(limits, link=replace(limits.link, silence_s=0.3))
    await hot.start(2)
    master = await hot.elect(1)
    await until(lambda: master.proxy.connections >= 3)
    follower = hot.brokers[2].replica.follower
    assert follower is not None and follower.stopped is None
    await hot.same()


@pytest.mark.processes  # real time-outs
async def test_a_hung_follower_stalls_no_producer_where_the_quorum_is_smaller(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.write(master, 20)
    await hot.confirmed(master)
    stalled = Proxy()
    stalled.to = master.listener.address
    port = await stalled.start()
    await hot.brokers[3].replica.follow(hot.target(master)._replace(port=port))
    await until(lambda: stalled.connections and hot.brokers[3].replica.follower.is_following)  # type: ignore[union-attr]
    stalled.flows.clear()
    loop = asyncio.get_running_loop()
    longest = 0.0
    for _ in range(30):
        began = loop.time()
        end = await hot.write(master, 10)
        await master.master.confirm.wait(end)
        longest = max(longest, loop.time() - began)
    assert longest < 0.9, "no time-out was waited for"
    await until(lambda: len(hot.authority.configuration.members) == 2)
    stalled.flows.set()
    await hot.same()
    await stalled.close()


async def test_a_closed_gate_holds_what_the_masters_disk_alone_has_and_lets_it_through_when_it_opens(
    hot: HotSet,
) -> None:
    master = await hot.start_all()
    end = await hot.write(master, 5)
    await hot.confirmed(master)
    wanted: list[bool] = []
    gate = master.master.gate
    gate.on_wanted = lambda: wanted.append(True)
    gate.close(end)
    later = await hot.write(master, 5)
    await hot.same()  # everybody has it
    assert master.wal.durable_offset == later
    assert master.master.durable.value == master.master.confirm_offset == end and wanted == [True]
    waiting = asyncio.create_task(master.master.durable.wait(later))
    gate.open()
    await asyncio.wait_for(waiting, 20)
    assert master.master.durable.value == later
    await hot.confirmed(master, later)


@pytest.mark.processes  # real time-outs
async def test_without_its_quorum_a_master_refuses_writes_and_a_record_in_the_wal_is_confirmed_later(
    hot: HotSet,
) -> None:
    master = await hot.start_all()
    await hot.write(master, 5)
    await hot.confirmed(master)
    members = len(master.master.configuration.members)
    master.master.check_writable(members)
    master.master.check_writable(members + 1)  # more than the set is to have: as many as that
    for broker_id in (2, 3):
        await hot.kill(broker_id)
    await until(lambda: master.master.refusal())
    with pytest.raises(NotEnoughReplicas):
        master.master.check_writable()
    end = await hot.write(master, 1)
    assert master.master.confirm_offset < end
    await hot.start(2)
    await hot.let_follow()
    await hot.confirmed(master, end)
    master.master.check_writable()


async def test_with_a_smaller_quorum_allowed_a_master_alone_confirms_once_the_controller_says_so(
    tmp_path: Path,
) -> None:
    hot = HotSet(tmp_path, policy=replace(POLICY, enable_auto_in_sync_replicas=True))
    master = await hot.start_all()
    lost: list[int] = []

    def unknown(wanted: SetConfiguration) -> None:
        if len(lost) < 3:
            lost.append(wanted.number)
            raise Unavailable("the answer was lost")

    hot.authority.trouble = unknown
    for broker_id in (2, 3):
        await hot.kill(broker_id)
    end = await hot.write(master, 5)
    await hot.confirmed(master, end)
    assert len(set(lost)) <= 2 and len(lost) == 3
    assert master.master.configuration.quorum == 1 and master.master.status()["degraded"]
    lost.clear()
    hot.authority.trouble, hot.authority.trouble_after = lambda _wanted: None, unknown
    await hot.start(2)
    await hot.let_follow()
    await until(lambda: master.master.configuration.quorum == 2)
    await hot.close()


async def test_a_master_whose_term_has_ended_is_told_by_the_controllers(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.write(master, 5)
    await hot.confirmed(master)
    hot.authority.epoch += 1
    await hot.kill(3)
    await until(lambda: master.deposed)
    assert master.deposed == [-1]


async def test_a_refused_configuration_counts_no_more_and_is_not_asked_for_in_a_hurry(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.write(master, 5)
    await hot.confirmed(master)

    def refuse(_wanted: SetConfiguration) -> None:
        raise AlterRefused("no")

    hot.authority.trouble = refuse
    await hot.kill(3)
    await until(lambda: hot.authority.asked >= 3)
    await hot.write(master, 50)
    await hot.confirmed(master)
    assert len(master.master.configuration.members) == 3


@pytest.mark.processes  # real time-outs
async def test_a_full_follower_waits_and_goes_on_when_there_is_room(hot: HotSet) -> None:
    master = await hot.start(1)
    hot.settings = structs.replace(hot.settings, max_bytes=4 * hot.settings.segment_bytes)
    await hot.start(2)
    hot.settings = structs.replace(hot.settings, max_bytes=8 << 20)
    await hot.start(3)
    await hot.elect(1)
    await hot.write(master, 700)
    await hot.confirmed(master)
    full = hot.brokers[2]
    follower = full.replica.follower
    assert follower is not None
    await until(lambda: follower.problem)
    assert follower.stopped is None and full.wal.end_offset < master.wal.end_offset
    await asyncio.sleep(1.5 * hot.limits.link.silence_s)
    assert full.wal.confirm_offset > 0
    assert master.proxy.connections == 2, "a follower that waits is heard of"
    hot.committed = master.wal.end_offset
    for broker in hot.brokers.values():
        broker.replica.note_committed(hot.committed)
    await hot.same()
    assert full.wal.start_offset > 0


@pytest.mark.processes  # real time-outs
async def test_a_full_follower_hears_that_what_fills_it_is_confirmed(tmp_path: Path) -> None:
    """What tells so comes behind the records for which there is no room."""
    hot = HotSet(tmp_path, policy=replace(POLICY, in_sync_replicas=3))
    master = await hot.start(1)
    hot.settings = structs.replace(hot.settings, max_bytes=4 * hot.settings.segment_bytes)
    full = await hot.start(2)
    hot.settings = structs.replace(hot.settings, max_bytes=8 << 20)
    await hot.start(3)
    await hot.elect(1)
    await hot.write(master, 5)
    await hot.confirmed(master)
    await hot.kill(3)  # nothing is confirmed without it
    await hot.write(master, 700)
    follower = full.replica.follower
    assert follower is not None
    await until(lambda: follower.problem and full.wal.durable_offset == full.wal.end_offset)
    await hot.start(3)
    await hot.let_follow()
    await hot.confirmed(master, full.wal.end_offset)
    assert full.wal.confirm_offset < hot.settings.segment_bytes, "no file of it may be freed yet"
    hot.committed = master.master.confirm_offset
    for broker in hot.brokers.values():
        broker.replica.note_committed(hot.committed)
    await hot.same()
    await hot.confirmed(master)
    await hot.close()


async def test_a_follower_whose_disk_fails_reports_it_and_stops(hot: HotSet, monkeypatch: pytest.MonkeyPatch) -> None:
    master = await hot.start_all()
    await hot.write(master, 5)
    await hot.confirmed(master)
    await hot.same()
    failing = hot.brokers[3]
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        if "wal-3" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    await hot.write(master, 50)
    await hot.confirmed(master)
    await until(lambda: failing.wal_failed)
    follower = failing.replica.follower
    assert follower is not None
    await until(lambda: follower.stopped is not None)
    assert isinstance(follower.stopped, WalFailed) and len(failing.wal_failed) == 1


async def test_a_master_whose_disk_fails_confirms_nothing_more(hot: HotSet, monkeypatch: pytest.MonkeyPatch) -> None:
    master = await hot.start_all()
    await hot.write(master, 5)
    await hot.confirmed(master)
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        if "wal-1" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    confirmed = master.master.confirm_offset
    end = await hot.write(master, 1)
    with pytest.raises(WalFailed):
        await master.master.confirm.wait(end)
    # The followers hold the record, which their master's disk does not; one of them leads, and confirms it.
    await until(lambda: hot.brokers[2].wal.durable_offset == end)
    assert master.master.confirm_offset == confirmed and len(master.wal_failed) == 1
    await hot.kill(1)
    new = await hot.elect(2)
    await hot.confirmed(new)
    assert new.wal.end_offset > end


async def test_followers_have_the_bytes_while_their_master_syncs_and_nothing_is_confirmed_before_it_has(
    hot: HotSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = await hot.start_all()
    await hot.write(master, 5)
    await hot.confirmed(master)
    await hot.same()
    before = master.wal.durable_offset
    with hung_syncs(monkeypatch, "wal-1"):
        end = await hot.write(master, 1)
        await until(lambda: all(hot.brokers[each].wal.durable_offset == end for each in (2, 3)))
        await until(lambda: all(one["end_offset"] == end for one in master.master.status()["followers"]))
        assert master.wal.durable_offset == before == master.master.confirm_offset
    await hot.confirmed(master, end)


async def test_a_follower_passes_records_to_its_disk_before_it_does_anything_else_with_them(
    hot: HotSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = await hot.start_all()
    await hot.write(master, 5)
    await hot.confirmed(master)
    await hot.same()
    follower = hot.brokers[2]
    tail, wal = follower.replica.tail, follower.wal
    real, before, writes = tail.add, wal.stats()["writes"], list[int]()

    def add(record: WalRecord) -> None:
        writes.append(wal.stats()["writes"] - before)
        real(record)

    monkeypatch.setattr(tail, "add", add)
    end = await hot.write(master, 1)
    await until(lambda: tail.end_offset == end)
    assert writes == [1]
    await hot.same()


async def test_two_replicas_that_contradict_each_other_stop_with_an_alarm(hot: HotSet) -> None:
    master = await hot.start_all()
    await hot.write(master, 20)
    await hot.confirmed(master)
    await hot.same()
    await until(lambda: hot.brokers[3].wal.confirm_offset == master.wal.end_offset)
    await hot.kill(3)
    for broker_id in (1, 2):
        await hot.kill(broker_id, wipe=True)  # two disks are lost: more than the set survives
    await hot.start(1)
    await hot.start(2)
    members = frozenset(WalReplica(*each) for each in hot.wal_ids.items())
    hot.authority.configuration = hot.authority.configuration._replace(members=members)
    master = await hot.elect(1)
    await hot.write(master, 3)
    odd = await hot.start(3)
    await hot.let_follow()
    await until(lambda: odd.diverged)
    follower = odd.replica.follower
    assert follower is not None
    await until(lambda: follower.stopped is not None)
    assert odd.wal.end_offset > 20_000, "nothing was changed"


async def test_a_new_master_keeps_its_unconfirmed_tail_and_has_its_records_in_memory(hot: HotSet) -> None:
    old = await hot.start_all()
    await hot.write(old, 30)
    await hot.confirmed(old)
    await hot.kill(3)
    hot.brokers[2].proxy.cut()
    old.proxy.flows.clear()  # nothing comes back: received, and not known to be confirmed
    end = old.wal.end_offset
    old.proxy.flows.set()
    await hot.same()
    await hot.kill(1)
    await hot.start(3)
    new = await hot.elect(2)
    assert new.wal.end_offset > end and len(new.replica.tail.records) == 30
    assert new.replica.tail.is_complete(new.wal) or new.replica.tail.end_offset == end
    await hot.confirmed(new)
    await hot.write(new, 10)
    await hot.confirmed(new)
    await hot.same()


async def test_a_follower_without_memory_for_its_tail_reads_its_wal_when_it_is_elected(hot: HotSet) -> None:
    hot.cache_bytes = 40_000
    old = await hot.start_all()
    await hot.write(old, 200)
    await hot.confirmed(old)
    await hot.same()
    tail = hot.brokers[2].replica.tail
    assert 0 < len(tail.records) < 40 and not tail.is_complete(hot.brokers[2].wal)
    await hot.kill(1)
    new = await hot.elect(2)
    assert len(new.replica.tail.records) == 200


async def test_a_master_that_follows_again_has_what_it_wrote_in_memory(hot: HotSet) -> None:
    old = await hot.start_all()
    await hot.write(old, 300)
    await hot.confirmed(old)
    await hot.same()  # so that the second broker is not behind, and is elected
    old.replica.hand_over()  # as the storage of its term takes the records over
    new = await hot.elect(2)
    await hot.write(new, 20)
    await hot.confirmed(new)
    await hot.same()
    tail, wal = old.replica.tail, old.wal
    await until(lambda: tail.is_complete(wal) and wal.confirm_offset == wal.end_offset, 20.0)
    assert tail.records.confirmed_end(1, 1, 0, wal.confirm_offset) == 320
    found = tail.records.read(1, 1, 0, 320, 1 << 20)
    assert found is not None and [each.base_offset for each in found] == list(range(320))


@pytest.mark.processes  # real time-outs
async def test_whatever_is_cancelled_or_cut_at_whatever_moment_the_replicas_become_equal(hot: HotSet) -> None:
    rng = random.Random(5)
    await hot.start_all()
    for turn in range(12):
        wanted = hot.brokers[rng.randrange(1, 4)]
        master = await hot.elect(wanted.broker_id) if turn % 3 else hot.leader()
        load = asyncio.create_task(hot.write(master, 150))
        others = [each for each in hot.brokers.values() if each is not master]
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(rng.random() * 0.02)
            one = rng.choice(others)
            trouble = rng.randrange(3)
            if trouble == 0:
                master.proxy.cut()
            elif trouble == 1:  # the same master at another address: the session is cancelled where it is
                port = master.listener.address[1] if turn % 2 else master.proxy_port
                await one.replica.follow(hot.target(master)._replace(port=port))
            else:
                follower = one.replica.follower
                if follower is not None:
                    await one.replica.promise(one.wal.promised_epoch)  # ends the role
                    await one.replica.follow(hot.target(master))
        await load
        await hot.let_follow()
    await hot.confirmed(hot.leader())
    await hot.same()
    assert not any(each.diverged or each.wal_failed for each in hot.brokers.values())


@pytest.mark.processes  # real time-outs
async def test_a_learner_receives_and_is_never_counted(hot: HotSet) -> None:
    hot.learners.add(3)
    hot.authority.configuration = SetConfiguration(1, frozenset([WalReplica(1, "wal-1"), WalReplica(2, "wal-2")]), 2)
    master = await hot.start_all()
    await hot.write(master, 50)
    await hot.confirmed(master)
    await hot.same()
    await hot.kill(2)
    end = await hot.write(master, 1)
    await until(lambda: hot.brokers[3].wal.durable_offset == end)
    assert master.master.confirm_offset < end


async def test_a_promotion_that_was_cancelled_goes_on_when_it_is_asked_for_again(
    hot: HotSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await hot.start(1)
    for method, after in (("promise", False), ("promise", True), ("begin_epoch", False), ("begin_epoch", True)):
        hot.authority.epoch += 1
        with monkeypatch.context() as patch:
            held = Held(patch, DiskWal, method, after=after)
            task = asyncio.create_task(one.replica.lead(hot.authority.epoch, hot.authority.configuration))
            await until(held.reached.is_set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() and one.replica.master is None
        master = await one.replica.lead(hot.authority.epoch, hot.authority.configuration)
        assert await one.replica.lead(hot.authority.epoch, hot.authority.configuration) is master
        assert one.wal.master_epoch == hot.authority.epoch
    with pytest.raises(Fenced):
        await one.replica.lead(1, hot.authority.configuration)
    stranger = SetConfiguration(1, frozenset([WalReplica(2, "wal-2")]), 1)
    with pytest.raises(InvalidInput):
        await one.replica.lead(99, stranger)
    one.master.told(stranger._replace(number=99))
    assert one.deposed == [-1]


async def test_a_new_master_with_less_than_the_bucket_has_goes_on_behind_that(hot: HotSet) -> None:
    one = await hot.start(1)
    one.replica.note_committed(5_000)  # all that was confirmed; the WAL was begun anew there, and has received nothing
    hot.authority.epoch = 1  # it is asked as soon as a tick has passed
    hot.authority.configuration = SetConfiguration(1, frozenset([WalReplica(1, hot.wal_ids[1])]), 1)
    master = await one.replica.lead(1, hot.authority.configuration)
    assert (one.wal.start_offset, one.wal.epoch_history.entries[0]) == (5_000, (1, 5_000))
    await until(lambda: master.confirm_offset == one.wal.end_offset > 5_000)
    end = await hot.write(one, 20)
    await until(lambda: master.confirm_offset == end)
