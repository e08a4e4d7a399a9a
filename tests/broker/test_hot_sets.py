"""The replicated WALs of real brokers: who keeps one, what becomes of it, and who may not.

Controller, sockets, disks and brokers are real, in one process; the bucket is in memory.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from msgspec import structs

from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tests.support.held import Held
from tidelog.broker import hot_set, hot_sets
from tidelog.broker.hot_set import HotSet
from tidelog.broker.hot_sets import HotSets
from tidelog.broker.replication import duty
from tidelog.broker.replication.duty import ReplicaRole
from tidelog.broker.replication.inputs import MasterTarget
from tidelog.broker.replication.replica import HotReplica
from tidelog.broker.settings import ReplicationSettings
from tidelog.cli.client import http_json
from tidelog.cli.subcommands.wal import wal
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.client.replica_sets import ReplicaSetClient
from tidelog.controller.model import wal_notes
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.records import ReplicaSetRecord
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.wal_notes import FoundWal, WalLoss, WalNote, WalVerdict, judge, note_in
from tidelog.controller.rpc.handshake import Credentials
from tidelog.process.replica_disks import DirectoryReplicaDisks
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, CorruptData, DamagedFile, StorageFailed
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.replication.following import Diverged, Match, WalFollower
from tidelog.storage.wal.base import WalFull
from tidelog.storage.wal.disk.wal import DiskWal

pytestmark = pytest.mark.timeout(300)

THREE = ReplicationSettings(total_replicas=3)


def record(cluster: Cluster, replica_set: int) -> ReplicaSetRecord:
    return cluster.image.replica_sets[replica_set]


def is_whole(cluster: Cluster, members: tuple[int, ...] = (1, 2, 3)) -> bool:
    """Whether each of these brokers' sets has these members, all in sync, and a master."""
    sets = [record(cluster, each) for each in members]
    return all(each.members == each.sync_state_set == members and each.master in members for each in sets)


def produce(cluster: Cluster, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True})
    for number in range(count):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(60) == 0


def test_every_broker_keeps_a_replica_of_each_set_and_a_stopped_master_is_followed_by_another(tmp_path: Path) -> None:
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        client = cluster.nodes[1].controller
        cluster.run(client.create_topic("t", 1, {}, assignment=[1]))
        produce(cluster, "t", 20)
        cluster.run(cluster.stop_broker(1))
        wait_until(lambda: record(cluster, 1).master in (2, 3), "another broker leads the set")
        heir = record(cluster, 1).master
        wait_until(lambda: cluster.serves(heir, "t", 0), "the partition is served")
        partition = cluster.nodes[heir].parts.partitions.manager.get("t", 0)
        wait_until(lambda: partition.high_watermark == 20, "everything is confirmed")
        produce(cluster, "t", 5)
        cluster.run(cluster.start_broker(1))
        wait_until(lambda: is_whole(cluster), "the broker has caught up")
        assert cluster.nodes[1].parts.data.hot_sets.problems() == []


def test_a_broker_tells_its_election_priority_to_all_its_sets_when_it_starts(tmp_path: Path) -> None:
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        cluster.run(cluster.stop_broker(2))
        cluster.replication = ReplicationSettings(total_replicas=3, election_priority=7)
        cluster.run(cluster.start_broker(2))

        def priorities() -> list[list[int]]:
            rows = cluster.image.replication
            return [[rows[each].priority_of(broker) for broker in (1, 2, 3)] for each in (1, 2, 3)]

        wait_until(lambda: priorities() == [[0, 7, 0]] * 3, "it has told its priority")


def test_the_last_broker_stops_in_time_although_no_quorum_confirms_that_its_partitions_are_closed(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        client = cluster.nodes[1].controller
        cluster.run(client.create_topic("t", 1, {}, assignment=[1]))
        produce(cluster, "t", 20)
        for broker in (3, 2, 1):
            began = time.monotonic()
            cluster.run(cluster.stop_broker(broker), 60)
            assert time.monotonic() - began < 30, "the budget of a stop here is 10 s"
        cluster.run(cluster.start_brokers(1, 2, 3))
        wait_until(lambda: is_whole(cluster), "all are back")
        leader = cluster.leader("t", 0)
        wait_until(lambda: cluster.serves(leader, "t", 0), "the partition is served")
        partition = cluster.nodes[leader].parts.partitions.manager.get("t", 0)
        wait_until(lambda: partition.high_watermark == 20, "everything is there")


def test_what_stopped_a_replica_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        cluster.run(cluster.stop_broker(1))
        wait_until(lambda: record(cluster, 1).master in (2, 3), "another broker leads the set")

        async def is_damaged(_self: HotReplica, _target: MasterTarget) -> bool:
            raise CorruptData("its epochs contradict each other")

        monkeypatch.setattr(HotReplica, "follow", is_damaged)
        cluster.run(cluster.start_broker(1))
        node = cluster.nodes[1]
        wait_until(lambda: len(node.parts.data.hot_sets.problems()) >= 3, "its three replicas have stopped")
        problems = http_json(node.parts.servers.admin.url, "/status")["problems"]
        told = [each for each in problems if "its epochs contradict each other" in each]
        assert sorted(each.split(" has stopped")[0] for each in told) == [
            f"the replica of replica set {each}" for each in (1, 2, 3)
        ]


def test_a_replica_that_contradicted_its_master_and_follows_the_next_one_is_no_problem_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        hot_sets, sets = cluster.nodes[2].parts.data.hot_sets, cluster.nodes[1].controller.replica_sets

        def contradicts(*_arguments: object, **_more: object) -> Match:
            raise Diverged("they part below what is confirmed")

        def elect() -> None:
            cluster.run(sets.begin_election(1, record(cluster, 1).master_epoch, "a test", designated=1))

        with monkeypatch.context() as patched:
            patched.setattr(WalFollower, "matched", contradicts)
            elect()
            wait_until(lambda: any("has stopped: its WAL" in each for each in hot_sets.problems()), "it says so")
            replica = hot_sets.get(1)
            assert replica is not None and "contradict each other" in replica.report()["problem"]
        elect()
        wait_until(lambda: record(cluster, 1).master == 1 and is_whole(cluster), "all follow the next master")
        wait_until(lambda: hot_sets.problems() == [], "nothing is wrong any more", 20.0)


def test_a_follower_whose_disk_hangs_before_it_follows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_set, "NOT_FOLLOWING_S", 0.5)
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        here, sets = cluster.nodes[2].parts.data.hot_sets, cluster.nodes[1].controller.replica_sets
        held = Held(monkeypatch, DiskWal, "truncate")
        cluster.run(sets.begin_election(1, record(cluster, 1).master_epoch, "a test", designated=1))
        told = "the replica of replica set 1 does not follow its master: its disk hangs"
        wait_until(lambda: told in here.problems(), "it says so")
        held.go_on.set()
        wait_until(lambda: here.problems() == [], "nothing is wrong any more", 20.0)


def test_a_replica_whose_disk_hangs_while_it_promises_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others were enough for the election, it stayed behind, and its broker was well."""
    monkeypatch.setattr(duty, "STUCK_S", 0.5)
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        here, sets = cluster.nodes[2].parts.data.hot_sets, cluster.nodes[1].controller.replica_sets
        held = Held(monkeypatch, DiskWal, "promise")
        cluster.run(sets.begin_election(1, record(cluster, 1).master_epoch, "a test", designated=1))
        told = "the replica of replica set 1 is following, and what is due has taken "
        wait_until(lambda: any(each.startswith(told) for each in here.problems()), "it says so")
        held.go_on.set()
        wait_until(lambda: here.problems() == [], "nothing is wrong any more", 20.0)


def test_a_follower_that_has_no_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        cluster.run(cluster.nodes[1].controller.create_topic("t", 1, {}, assignment=[1]))
        room = asyncio.Event()
        receive, receivable = DiskWal.receive, DiskWal.receivable

        reasons = ["the next WAL file is being prepared"]  # before the disk was found to be full

        async def has_no_room(*arguments: Any, **options: Any) -> Any:
            if not room.is_set():
                raise WalFull(
                    reasons.pop() if reasons else "the next WAL file cannot be prepared: No space left on device"
                )
            return await receive(*arguments, **options)

        async def wait_for_room(*arguments: Any) -> None:
            await room.wait()
            await receivable(*arguments)

        monkeypatch.setattr(DiskWal, "receive", has_no_room)
        monkeypatch.setattr(DiskWal, "receivable", wait_for_room)
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": 1})
        producer.produce("t", b"x")
        assert producer.flush(60) == 0
        admin = cluster.nodes[2].parts.servers.admin.url

        def told() -> list[str]:
            return [each for each in http_json(admin, "/status")["problems"] if "No space left on device" in each]

        wait_until(lambda: any("replica set 1 does not follow its master" in each for each in told()), "it says so")

        async def make_room() -> None:
            room.set()

        cluster.run(make_room())
        wait_until(lambda: not told(), "it goes on, and says so no more")


def test_clients_are_not_let_in_before_a_broker_knows_its_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        address = cluster.nodes[1].bootstrap
        cluster.run(cluster.stop_broker(1))
        wait_until(lambda: record(cluster, 1).master in (2, 3), "another broker leads the set")
        held = Held(monkeypatch, HotReplica, "follow")
        starting = cluster.begin(cluster.start_broker(1))
        assert held.reached.wait(30)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 5)
        assert not starting.done()
        held.go_on.set()
        starting.result(60)
        socket.create_connection(address, 5).close()


def test_a_replica_that_was_removed_is_deleted_and_one_that_is_assigned_joins(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=4, replication=ReplicationSettings(total_replicas=2)) as cluster:

        def others() -> tuple[int, ...]:
            return tuple(each for each in record(cluster, 1).sync_state_set if each != 1)

        wait_until(lambda: len(others()) == 1, "the set has a second member")
        (old,) = others()
        new = next(each for each in (2, 3, 4) if each != old)
        client = cluster.nodes[1].controller
        kept = tmp_path / f"broker-{old}" / "replica-1"
        assert kept.is_dir()
        cluster.run(client.replica_sets.assign_replica(1, new))
        wait_until(lambda: new in others(), "the assigned broker is in sync")
        cluster.run(cluster.stop_broker(old))
        wait_until(lambda: old not in others(), "the stopped one is not in sync any more", 120)
        cluster.run(client.replica_sets.remove_replica(1, old))
        cluster.run(cluster.start_broker(old))
        wait_until(lambda: not kept.exists(), "the replica was deleted")
        assert others() == (new,)


def test_a_broker_that_was_removed_from_a_set_while_it_read_its_wal_does_not_join_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many gigabytes take minutes, in which the active controller replaces it, or an operator does."""
    with Cluster(tmp_path, brokers=3, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 2, "the set has a second member")
        (old,) = (each for each in record(cluster, 1).members if each != 1)
        sets, kept = cluster.nodes[1].controller.replica_sets, tmp_path / f"broker-{old}" / "replica-1"
        cluster.run(sets.assign_replica(1, 5 - old))
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 3, "the set has a third member")
        cluster.run(cluster.stop_broker(old))
        wait_until(lambda: old not in record(cluster, 1).sync_state_set, "the stopped one is not in sync", 120)
        held = Held(monkeypatch, HotSets, "prepare", after=True)
        starting = cluster.begin(cluster.start_broker(old))
        assert held.reached.wait(30)
        cluster.run(sets.remove_replica(1, old))
        held.go_on.set()
        starting.result(60)
        wait_until(lambda: not kept.exists() or old in record(cluster, 1).members, "the replica was deleted")
        hot_sets = cluster.nodes[old].parts.data.hot_sets
        wait_until(lambda: hot_sets.get(1) is None or old in record(cluster, 1).members, "it is not open")
        assert record(cluster, 1).members == (1, 5 - old)


def test_a_broker_does_not_replace_the_policy_that_an_operator_has_set_while_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, brokers=2, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: is_whole(cluster, (1, 2)), "both sets have two members")
        sets = cluster.nodes[1].controller.replica_sets
        wanted = structs.replace(cluster.image.replication[1].policy, slave_timeout_s=7.0)
        held = Held(monkeypatch, ReplicaSetClient, "set_policy")
        starting = cluster.begin(cluster.start_broker(3))
        assert held.reached.wait(30)
        monkeypatch.undo()
        cluster.run(sets.set_policy(3, wanted))
        held.go_on.set()
        starting.result(60)
        assert cluster.image.replication[3].policy == wanted


def test_a_process_that_was_replaced_by_one_with_another_disk_deletes_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata speak of the other process: what this one has may be the last copy of what was confirmed."""
    with Cluster(tmp_path, brokers=3, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 2, "the set has a second member")
        (old,) = (each for each in record(cluster, 1).members if each != 1)
        node, kept = cluster.nodes[old], tmp_path / f"broker-{old}" / "replica-1"
        files = {each.name for each in kept.iterdir() if not each.name.endswith(".tmp")}
        deleted: list[int] = []

        async def noted(_self: DirectoryReplicaDisks, replica_set: int) -> None:
            deleted.append(replica_set)

        monkeypatch.setattr(DirectoryReplicaDisks, "remove", noted)
        node.controller.on_fenced(lambda _error: None)  # its heartbeats are late: its metadata tell it first

        async def replace() -> None:
            client = ControllerClient(
                [cluster.controller.address],
                TcpNetwork(),
                SystemClock(),
                random.Random(),
                credentials=Credentials(b"s" * 32, old),
            )
            await client.start()
            registration = RegisterBroker(old, f"check-{old}", "another", "127.0.0.1", 1, "", "", "disk")
            epoch = await client.register_broker(registration)
            await client.replica_sets.add_replica(1, old, epoch, "another WAL")
            await client.close()

        cluster.run(replace())
        wait_until(node.failed.done, "the process that was replaced ends")

        def has_ended() -> bool:
            one = node.parts.data.hot_sets.get(1)
            return one is None or (one.duty is not None and one.duty.role in (ReplicaRole.REMOVED, ReplicaRole.FAILED))

        wait_until(has_ended, "so does its replica")
        for name in ("a", "b", "c"):  # its stop takes a while, in which the metadata change
            topic = cluster.run(cluster.nodes[1].controller.create_topic(name, 1, {}))
            wait_until(partial(node.controller.image.topics.__contains__, topic.id), "it has heard of the topic")
        cluster.run(cluster.stop_broker(old))
        assert deleted == [] and files <= {each.name for each in kept.iterdir()}


LOSS = WalLoss(1, 1 << 30, 0, "an operator elected another replica", 0, 1 << 30, True, ())


EARLIER = f"{0:020d}.wal.replaced-7-512"
"""A file that a replica has kept when it started over."""


@pytest.mark.parametrize(
    ("is_down", "earlier"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["while it runs", "while it is down", "while it runs, kept before", "while it is down, kept before"],
)
def test_a_replica_that_was_removed_is_kept_where_it_may_have_records_that_were_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_down: bool, earlier: bool
) -> None:
    with Cluster(tmp_path, brokers=3, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 2, "the set has a second member")
        (old,) = (each for each in record(cluster, 1).members if each != 1)
        sets, kept = cluster.nodes[1].controller.replica_sets, tmp_path / f"broker-{old}" / "replica-1"
        cluster.run(sets.assign_replica(1, 5 - old))
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 3, "the set has a third member")
        loss = LOSS
        if earlier:  # it has started over since, as its WAL had records that were given up
            loss = structs.replace(LOSS, master_epoch=0)
            (kept / EARLIER).write_bytes(b"records")
        for module in (wal_notes, hot_sets):  # as if an operator had elected another one, with an accepted loss
            monkeypatch.setattr(module, "losses_in", lambda _rows: [loss])
        if is_down:
            cluster.run(cluster.stop_broker(old))
            wait_until(lambda: old not in record(cluster, 1).sync_state_set, "the stopped one is not in sync", 120)
            cluster.run(sets.remove_replica(1, old))
            cluster.run(cluster.start_broker(old))
        else:
            cluster.run(sets.retire_replica(1, old))
        wait_until(lambda: not kept.exists(), "the replica is not used any more")
        aside = kept.with_name(f"rejected-{kept.name}-1")
        assert (aside / EARLIER).exists() if earlier else any(aside.iterdir())
        found = cluster.nodes[old].parts.data.hot_sets
        wait_until(lambda: any(f"is kept at {aside}" in each for each in found.problems()), "it says where")


def test_a_replica_whose_deletion_does_not_end_is_told_for_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_sets, "LONG_S", 0.5)
    with Cluster(tmp_path, brokers=3, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 2, "the set has a second member")
        sets = cluster.nodes[1].controller.replica_sets
        one = next(each for each in (2, 3) if each in record(cluster, 1).members)
        cluster.run(sets.assign_replica(1, 5 - one))
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 3, "the set has a third member")
        here = cluster.nodes[one].parts.data.hot_sets
        held = Held(monkeypatch, DirectoryReplicaDisks, "remove")
        cluster.run(sets.retire_replica(1, one))
        told = "the replica of replica set 1 is being deleted for "
        wait_until(lambda: any(each.startswith(told) for each in here.problems()), "it says so")
        held.go_on.set()
        wait_until(lambda: here.problems() == [], "nothing is wrong any more", 20.0)


def test_a_replica_that_could_not_be_deleted_begins_anew_when_it_is_wanted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, brokers=3, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 2, "the set has a second member")
        sets = cluster.nodes[1].controller.replica_sets
        one = next(each for each in (2, 3) if each in record(cluster, 1).members)
        cluster.run(sets.assign_replica(1, 5 - one))
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 3, "the set has a third member")
        hot_sets = cluster.nodes[one].parts.data.hot_sets

        async def is_stuck(_self: DirectoryReplicaDisks, _replica_set: int) -> None:
            raise StorageFailed("the directory cannot be deleted: Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(DirectoryReplicaDisks, "remove", is_stuck)
            cluster.run(sets.retire_replica(1, one))
            wait_until(lambda: one not in record(cluster, 1).members, "it has left")
            wait_until(lambda: any("cannot be deleted" in each for each in hot_sets.problems()), "it says so")
        cluster.run(sets.assign_replica(1, one))
        wait_until(lambda: one in record(cluster, 1).sync_state_set, "it is in sync again", 30.0)
        wait_until(lambda: not any("deleted" in each for each in hot_sets.problems()), "nothing is wrong any more")


def test_a_learner_receives_everything_is_not_counted_and_is_promoted_without_receiving_it_again(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, brokers=3, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: len(record(cluster, 1).sync_state_set) == 2, "the set has a second member")
        learner = next(each for each in (2, 3) if each not in record(cluster, 1).members)
        sets = cluster.nodes[1].controller.replica_sets
        cluster.run(cluster.nodes[1].controller.create_topic("t", 1, {}, assignment=[1]))
        cluster.run(sets.assign_replica(1, learner, is_learner=True))
        wait_until(lambda: record(cluster, 1).learners == (learner,), "it has joined")
        produce(cluster, "t", 50)

        def copy() -> HotSet:
            found = cluster.nodes[learner].parts.data.hot_sets.get(1)
            assert found is not None
            return found

        def master() -> HotSet:
            found = cluster.nodes[1].parts.data.hot_sets.get(1)
            assert found is not None
            return found

        wait_until(lambda: copy().wal.durable_offset == master().wal.end_offset, "it has everything")
        assert record(cluster, 1).learners == (learner,) and len(record(cluster, 1).sync_state_set) == 2
        wal_id, start = copy().report()["wal_id"], copy().wal.start_offset
        cluster.run(sets.assign_replica(1, learner))
        wait_until(lambda: learner in record(cluster, 1).sync_state_set, "it is in sync")
        assert record(cluster, 1).learners == ()
        assert (copy().report()["wal_id"], copy().wal.start_offset) == (wal_id, start)
        cluster.run(sets.begin_election(1, record(cluster, 1).master_epoch, "a test", designated=learner))
        wait_until(lambda: record(cluster, 1).master == learner, "it may lead")


def test_a_set_of_one_grows_when_its_broker_is_started_with_more_replicas(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=3, replication=ReplicationSettings()) as cluster:
        cluster.run(cluster.nodes[1].controller.create_topic("t", 3, {}, assignment=[1, 2, 3]))
        for _ in range(3):
            produce(cluster, "t", 10)
        cluster.replication = THREE
        for each in (1, 2, 3):
            cluster.run(cluster.stop_broker(each))
            cluster.run(cluster.start_broker(each))
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        ends = []
        for index in range(3):
            leader = cluster.leader("t", index)
            wait_until(partial(cluster.serves, leader, "t", index), "it is served")
            ends.append(cluster.nodes[leader].parts.partitions.manager.get("t", index).high_watermark)
        assert sum(ends) == 30


@pytest.mark.parametrize(
    ("wal", "secret", "what"), [("s3", True, "wal.kind is s3"), ("disk", False, "the cluster has no secret")]
)
def test_a_broker_that_cannot_replicate_says_why_and_does_not_start(
    tmp_path: Path, wal: str, secret: bool, what: str
) -> None:
    with Cluster(tmp_path, brokers=0, wal=wal, replication=THREE if secret else None) as cluster:
        cluster.replication = THREE
        with pytest.raises(ConfigError, match=what):
            cluster.run(asyncio.wait_for(cluster.start_broker(1), 30))


def note_of(cluster: Cluster, replica_set: int) -> WalNote:
    found = note_in(cluster.image.kv, replica_set)
    assert found is not None
    return found


def shrink(cluster: Cluster) -> None:
    """Have broker 1 keep its set alone."""
    sets = cluster.nodes[1].controller.replica_sets
    cluster.run(sets.set_policy(1, PolicyRecord()))
    cluster.run(sets.retire_replica(1, 2))
    wait_until(lambda: record(cluster, 1).members == (1,), "it has one member")


@pytest.mark.parametrize("restarted", [False, True], ids=["in its first term", "in another term"])
def test_the_loss_of_a_wal_is_noticed_when_its_set_has_shrunk_to_one_member(tmp_path: Path, restarted: bool) -> None:
    with Cluster(tmp_path, brokers=2, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: is_whole(cluster, (1, 2)), "both sets have two members in sync")
        cluster.run(cluster.nodes[1].controller.create_topic("t", 1, {}, assignment=[1]))
        wait_until(lambda: note_in(cluster.image.kv, 1) is not None, "the controllers have a note of the WAL")
        wait_until(lambda: note_of(cluster, 1).may_grow, "the note that is left says that there may be more")
        cluster.run(cluster.nodes[1].parts.data.upload_now())
        assert note_of(cluster, 1).may_grow, "nor is it reported as committed while others have replicas"
        produce(cluster, "t", 20)
        if restarted:
            cluster.run(cluster.stop_broker(1))
            cluster.run(cluster.start_broker(1))
            cluster.run(
                cluster.nodes[1].controller.replica_sets.begin_election(
                    1, record(cluster, 1).master_epoch, "a test", designated=1
                )
            )
            wait_until(lambda: record(cluster, 1).master == 1 and is_whole(cluster, (1, 2)), "it leads")
        shrink(cluster)
        produce(cluster, "t", 20)
        own = cluster.nodes[1].parts.data.hot_sets.get(1)
        assert own is not None
        wait_until(lambda: note_of(cluster, 1).end_offset == own.wal.end_offset, "where it ends is known", 10)
        committed = record(cluster, 1).committed_wal_offset
        empty, older = FoundWal("disk", (), 0, False), FoundWal("disk", (1,), committed, False)
        for found in (empty, older):
            assert judge(note_of(cluster, 1), committed, owns=True, found=found) is WalVerdict.LOST


def test_logs_with_replicas_are_drained_at_their_masters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    monkeypatch.setenv("TIDELOG_CONTROLLER__SECRET_FILE", str(secret))
    with Cluster(tmp_path / "cluster", replication=THREE, age_ms=3_600_000) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        cluster.run(cluster.nodes[1].controller.create_topic("t", 3, {}, assignment=[1, 2, 3]))
        produce(cluster, "t", 30)
        cluster.run(cluster.stop_broker(1))
        wait_until(lambda: record(cluster, 1).master in (2, 3), "another broker leads the first set")
        heir = record(cluster, 1).master
        wait_until(lambda: cluster.serves(heir, "t", 0), "the partition is served")
        produce(cluster, "t", 30)
        drained = CliRunner().invoke(wal, ["drain", "--timeout", "60", "--bootstrap", cluster.bootstrap])
        assert drained.exception is None, drained.exception
        assert "everything in the logs of 3 brokers is committed" in drained.output
        for each in (1, 2, 3):
            storage = cluster.nodes[record(cluster, each).master].parts.data.storages.get(each)
            assert storage.is_all_committed, f"replica set {each}"
        shown = CliRunner().invoke(wal, ["list", "--bootstrap", cluster.bootstrap])
        assert [line.split("nothing: ")[1] for line in shown.output.splitlines()[1:]] == ["3 replicas"] * 3


def test_a_broker_that_was_removed_and_assigned_again_joins_however_late_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, brokers=2, replication=ReplicationSettings(total_replicas=2)) as cluster:
        wait_until(lambda: is_whole(cluster, (1, 2)), "both sets have two members in sync")
        copy = cluster.nodes[2].parts.data.hot_sets.get(1)
        assert copy is not None and copy.duty is not None
        duty = copy.duty
        held = Held(monkeypatch, HotSets, "_keep")
        shrink(cluster)
        wait_until(lambda: duty.role is ReplicaRole.REMOVED, "the replica knows that it was removed")
        sets = cluster.nodes[1].controller.replica_sets
        cluster.run(sets.assign_replica(1, 2))
        wait_until(lambda: 2 in cluster.nodes[2].controller.image.replication[1].assigned, "it is assigned again")
        held.go_on.set()
        wait_until(lambda: record(cluster, 1).sync_state_set == (1, 2), "it has joined again", 30)
        assert cluster.nodes[2].parts.data.hot_sets.problems() == []


def test_a_broker_whose_own_log_cannot_be_opened_ends_with_that_error(tmp_path: Path) -> None:
    """Its exit code tells damage from a setting that is wrong."""
    with Cluster(tmp_path, replication=THREE) as cluster:
        wait_until(lambda: is_whole(cluster), "all sets have three members in sync")
        cluster.run(cluster.stop_broker(2))
        (tmp_path / "broker-2" / "wal" / "id").write_bytes(b"{}")
        with pytest.raises(DamagedFile, match="id in the WAL's directory"):
            cluster.run(cluster.start_broker(2))
