"""`ReplicaDuty` with a real controller, real sockets and real disks: brokers that keep a replica set by themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.controller.controller_helpers import until
from tests.support.held import Held
from tests.support.hot_replicas import LIMITS
from tests.support.hung_disk import hung_syncs
from tests.support.kept_set import SET, SelfKeptSet
from tidelog.broker.replication.duty import ReplicaDuty, ReplicaRole
from tidelog.broker.replication.inputs import MasterTarget
from tidelog.controller.model.records import NO_BROKER
from tidelog.controller.model.replication import ElectionRecord, PolicyRecord
from tidelog.controller.model.wal_notes import WalLost
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import TidelogError
from tidelog.storage.wal.base import WalFull
from tidelog.storage.wal.disk.wal import DiskWal

pytestmark = pytest.mark.timeout(300)


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


async def test_a_process_that_was_replaced_by_one_with_another_disk_does_not_take_itself_for_removed(
    kept: SelfKeptSet,
) -> None:
    """Else its files would be deleted."""
    await kept.settled()
    third = kept.processes[3]
    client, proxy = await kept.register(3)
    await client.replica_sets.add_replica(SET, 3, kept.registrations[3], "another WAL")
    await until(lambda: third.duty.role in (ReplicaRole.FAILED, ReplicaRole.REMOVED))
    assert third.duty.role is ReplicaRole.FAILED and "is not current" in third.duty.problem
    await proxy.close()
    await client.close()


async def test_a_policy_that_is_set_reaches_the_master(kept: SelfKeptSet) -> None:
    await kept.settled()
    image = kept.node.image
    wanted = PolicyRecord(3, 3, 2, max_behind_s=1.0, slave_timeout_s=1.0)
    await kept.processes[1].client.replica_sets.set_policy(SET, wanted)

    def quorum() -> int:
        configuration = image.configuration(SET)
        return configuration.quorum if configuration is not None else 0

    await until(lambda: quorum() == 3)


async def test_a_broker_that_is_started_with_another_priority_tells_it(kept: SelfKeptSet) -> None:
    await kept.settled()

    def priorities() -> list[int]:
        return [kept.node.image.replication[SET].priority_of(each) for each in (1, 2, 3)]

    assert priorities() == [0, 0, 0]
    await kept.end(3)
    kept.priorities[3] = 4
    await kept.launch(3)
    await until(lambda: priorities() == [0, 0, 4])
    version = kept.node.image.replication[SET]
    await kept.settled()
    await kept.end(1)
    kept.priorities[1] = -2
    assert (await kept.settled()).broker_id == 3, "of two that are equally far"
    await kept.launch(1)
    await until(lambda: priorities() == [-2, 0, 4])
    await kept.settled()
    assert all(one.failures == [] and one.duty.problem == "" for one in kept.processes.values())
    assert version.priorities == ()


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


async def test_a_member_that_is_to_leave_is_let_go_of_while_it_follows_and_then_removed(kept: SelfKeptSet) -> None:
    first = await kept.settled()
    await kept.write(first, 50)
    await kept.confirmed(first)
    await kept.processes[2].client.replica_sets.retire_replica(SET, 3)
    await until(lambda: kept.processes[3].duty.role is ReplicaRole.REMOVED)
    assert list(kept.node.image.replica_sets[SET].members) == [1, 2]
    assert kept.node.image.replication[SET].leaving == ()
    await kept.write(first, 50)
    await kept.confirmed(first)
    assert kept.node.image.replica_sets[SET].master == 1 and first.wal.end_offset > 0


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


async def test_a_directory_that_was_set_back_promises_nothing_where_it_alone_has_confirmed(
    kept: SelfKeptSet, tmp_path: Path
) -> None:
    first = await kept.settled()
    alone = PolicyRecord(3, 2, 1, enable_auto_in_sync_replicas=True, max_behind_s=1.0, slave_timeout_s=1.0)
    await kept.processes[1].client.replica_sets.set_policy(SET, alone)
    for each in (2, 3):
        await kept.end(each)
    await until(lambda: kept.node.image.configuration(SET).quorum == 1)  # type: ignore[union-attr]
    await kept.write(first, 20)
    await kept.confirmed(first)
    shutil.copytree(tmp_path / "wal-1", tmp_path / "old")
    await kept.write(first, 200)
    await kept.confirmed(first)

    def known_end() -> int:
        (member,) = kept.node.image.replication[SET].in_sync
        return member.known_end

    await until(lambda: known_end() == first.wal.end_offset)
    await kept.end(1)
    shutil.rmtree(tmp_path / "wal-1")
    shutil.move(tmp_path / "old", tmp_path / "wal-1")
    process = await kept.launch(1)
    await until(lambda: process.failures != [] or process.terms != [])
    assert process.terms == [] and isinstance(process.failures[0], WalLost)


async def test_metadata_of_an_election_that_is_over_end_no_replica_that_has_followed_its_master(
    kept: SelfKeptSet,
) -> None:
    first = await kept.settled()
    await kept.write(first, 20)
    await kept.confirmed(first)
    await kept.same()
    await until(lambda: kept.node.image.replica_sets[SET].sync_state_set == (1, 2, 3))
    record, row = kept.node.image.replica_sets[SET], kept.node.image.replication[SET]
    third = kept.processes[3]
    image = third.client.image
    await until(lambda: image.version == kept.node.image.version)
    image.replica_sets[SET] = msgspec.structs.replace(record, master=NO_BROKER)  # as they were a moment ago
    image.replication[SET] = msgspec.structs.replace(row, election=ElectionRecord("another master", 0))
    await kept.processes[1].client.create_topic("t", 1, {})  # has the metadata looked at
    await until(lambda: kept.node.image.replica_sets[SET].sync_state_set_epoch > record.sync_state_set_epoch)
    await until(lambda: third.failures != [] or kept.node.image.replica_sets[SET].sync_state_set == (1, 2, 3))
    await until(lambda: third.failures != [] or third.duty.role is ReplicaRole.FOLLOWING)
    assert third.failures == []


async def test_a_replica_that_is_assigned_again_before_it_saw_that_it_was_removed_joins(
    kept: SelfKeptSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await kept.settled()
    await kept.write(first, 50)
    third = kept.processes[3]
    sets = kept.processes[1].client.replica_sets
    await third.broker.replica.follower.stop()  # type: ignore[union-attr]  # it hangs
    await until(lambda: kept.node.image.replica_sets[SET].sync_state_set == (1, 2))
    held = Held(monkeypatch, ReplicaDuty, "_look")
    await sets.remove_replica(SET, 3)
    await sets.assign_replica(SET, 3)
    await until(lambda: 3 in third.client.image.replication[SET].assigned)
    held.go_on.set()
    await until(lambda: 3 in kept.node.image.replica_sets[SET].members)
    assert third.duty.role is not ReplicaRole.REMOVED


async def test_a_replica_that_has_promised_more_than_the_metadata_know_is_a_problem_and_so_is_a_master_that_it_met(
    kept: SelfKeptSet,
) -> None:
    """The controllers' metadata were set back, for example."""
    first = await kept.settled()
    await kept.end(3)
    disk = FileDisk(kept.path / "wal-3")
    wal = DiskWal(disk, kept.settings, rng=random.Random(1))
    await wal.recover(lambda _: None)
    await wal.promise(99)
    await wal.close()
    await disk.close()
    third, leader = await kept.launch(3), kept.processes[first.broker_id]
    await until(lambda: third.duty.problems() != [])
    assert "has promised epoch 99; the master, broker 1, is of epoch" in third.duty.problems()[0]
    assert third.duty.role is ReplicaRole.WAITING and leader.duty.problems() == []
    await third.broker.replica.follow(MasterTarget(99, 1, "127.0.0.1", first.proxy_port))
    await until(lambda: leader.duty.problems() != [])
    assert "leads no more" in leader.duty.problems()[0]
    assert "a follower has promised a newer one" in first.master.status()["refusal"]


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[SelfKeptSet]:
    """A set whose masters soon take their disk for hung."""
    here = SelfKeptSet(tmp_path)
    here.limits = dataclasses.replace(LIMITS, hung_disk_s=0.4)
    await here.begin()
    yield here
    await here.finish()


async def test_a_master_whose_disk_hangs_while_its_process_lives_lets_another_one_lead(
    impatient: SelfKeptSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = impatient
    first = await kept.settled()
    assert first.broker_id == 1
    end = await kept.write(first, 20)
    await kept.confirmed(first)
    term = first.master
    with hung_syncs(monkeypatch, "wal-1") as go_on:
        lost = await kept.write(first, 1)
        await until(lambda: all(kept.brokers[each].wal.durable_offset == lost for each in (2, 3)))
        await until(lambda: kept.node.image.replica_sets[SET].master in (2, 3))
        second = kept.leader()
        await until(lambda: second.replica.master is not None)
        await kept.confirmed(second, lost)
        election = kept.node.image.replication[SET].last_election
        assert election is not None and election.reason == "the disk of broker 1 hangs"
        assert term.ended is not None and term.confirm_offset == end, "the old master has confirmed nothing more"
        assert await kept.write(second, 20) > lost
        await kept.confirmed(second)
        go_on.set()
        await kept.settled()
        await kept.same()


@pytest.mark.parametrize("trouble", ["hangs", "full"])
async def test_a_replica_that_is_elected_and_cannot_begin_its_term_lets_another_one_lead(
    impatient: SelfKeptSet, trouble: str
) -> None:
    kept = impatient
    first = await kept.settled()
    end = await kept.write(first, 20)
    await kept.confirmed(first)
    second, go_on = kept.brokers[2], asyncio.Event()
    begin_epoch = second.wal.begin_epoch

    async def stuck(epoch: int) -> None:
        if trouble == "full" and not go_on.is_set():
            raise WalFull("no space left on device", hint="free disk space")
        await go_on.wait()
        await begin_epoch(epoch)

    second.wal.begin_epoch = stuck  # type: ignore[method-assign]
    sets, epoch = kept.processes[1].client.replica_sets, kept.node.image.replica_sets[SET].master_epoch
    await sets.begin_election(SET, epoch, "an operator asks", designated=2)
    await until(lambda: kept.node.image.replica_sets[SET].master in (1, 3))
    election = kept.node.image.replication[SET].last_election
    assert election is not None and election.last_master == 2
    assert election.reason.startswith("broker 2 does not begin its term")
    if trouble == "hangs":
        assert "its disk hangs" in kept.processes[2].duty.problems()[0]
    await until(lambda: kept.leader().replica.master is not None)
    third = kept.leader()
    await kept.confirmed(third, end)
    go_on.set()
    await kept.settled()
    await kept.write(third, 20)
    await kept.confirmed(third)
    await kept.same()
    assert kept.processes[2].duty.role is ReplicaRole.FOLLOWING and kept.processes[2].duty.problems() == []


async def test_a_master_whose_disk_hangs_goes_on_where_nobody_else_is_in_sync(
    impatient: SelfKeptSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = impatient
    first = await kept.settled()
    term, epoch = first.master, first.master.epoch
    for each in (2, 3):
        await kept.end(each)
    with hung_syncs(monkeypatch, "wal-1") as go_on:
        end = await kept.write(first, 1)
        await until(lambda: "no other replica is in sync" in caplog.text)
        go_on.set()
        await until(lambda: first.wal.durable_offset == end)
        assert kept.node.image.replica_sets[SET].master_epoch == epoch == term.epoch and term.ended is None
