"""DescribeCluster, DescribeTopicPartitions, DescribeLogDirs, DescribeProducers, DeleteRecords, ACLs, elections."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from tests.support.admin_world import CLUSTER_ID, AdminWorld, WorldLog, part, versions
from tidelog.broker.kafka.handlers import (
    acls,
    delete_records,
    describe_cluster,
    describe_producers,
    describe_quorum,
    describe_topics,
    elections,
    log_dirs,
    unregister_broker,
)
from tidelog.broker.kafka.services import ApiHandler
from tidelog.controller.image.image import Delta
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import BrokerNotDrained
from tidelog.stream.partition_log import ProducerInfo

NONE_ASKED = -(1 << 31)


# --- DescribeCluster ---------------------------------------------------------------------------------------------


def cluster(world: AdminWorld, version: int, **fields: Any) -> Any:
    fields = {"include_cluster_authorized_operations": False, "include_fenced_brokers": False, **fields}
    return world.call(describe_cluster.APIS, 60, version, **fields)


@pytest.mark.parametrize("version", versions(describe_cluster.APIS, 60))
def test_every_version_of_describe_cluster_lists_the_brokers_alive(version: int) -> None:
    world = AdminWorld(brokers=(2, 1, 3))
    world.controller.set_alive(3, False)
    answer = cluster(world, version)
    assert (int(answer.error_code), answer.cluster_id, answer.controller_id) == (0, CLUSTER_ID, 1)
    assert [(one.broker_id, one.host, one.port, one.rack) for one in answer.brokers] == [
        (1, "127.0.0.1", 9092, None),
        (2, "127.0.0.1", 9093, None),
    ]
    assert answer.cluster_authorized_operations == NONE_ASKED


def test_the_controller_of_describe_cluster_is_the_broker_that_answers() -> None:
    world = AdminWorld(brokers=(0, 1, 2))
    assert cluster(world, 1).controller_id == 1
    world.controller.set_alive(1, False)
    assert cluster(world, 1).controller_id == 0


def test_fenced_brokers_are_listed_when_asked_for() -> None:
    world = AdminWorld(brokers=(1, 2))
    world.controller.set_alive(2, False)
    answer = cluster(world, 2, include_fenced_brokers=True)
    assert [(one.broker_id, one.is_fenced) for one in answer.brokers] == [(1, False), (2, True)]


def test_authorized_operations_are_all_without_an_authorizer() -> None:
    answer = cluster(AdminWorld(), 1, include_cluster_authorized_operations=True)
    assert answer.cluster_authorized_operations == sum(1 << bit for bit in (5, 7, 8, 9, 10, 11, 12))


@pytest.mark.parametrize(("endpoint", "code"), [(2, 114), (7, 115)])
def test_endpoints_that_are_not_brokers_are_refused(endpoint: int, code: int) -> None:
    answer = cluster(AdminWorld(), 2, endpoint_type=endpoint)
    assert (int(answer.error_code), answer.brokers) == (code, ())


# --- DescribeQuorum ----------------------------------------------------------------------------------------------

PEERS = [
    {"id": 2, "match_index": 41, "lag": 0, "silent_s": 0.5},
    {"id": 3, "match_index": 30, "lag": 11, "silent_s": 2.0},
]
LEADER = {"id": 1, "address": "c1:9001", "state": "active", "term": 7, "last_index": 41, "applied_index": 40}
FOLLOWERS = [{"id": number, "address": f"c{number}:900{number}", "state": "follower"} for number in (2, 3)]


def quorum(version: int, members: list[dict[str, Any]], topic: str = "__cluster_metadata") -> Any:
    world = AdminWorld()

    async def report() -> dict[str, Any]:
        return {"members": members, "problems": []}

    world.services.quorum = report
    asked = part(
        55, version, "TopicData", topic_name=topic, partitions=(part(55, version, "PartitionData", partition_index=0),)
    )
    return world.call(describe_quorum.APIS, 55, version, topics=(asked,))


@pytest.mark.parametrize("version", versions(describe_quorum.APIS, 55))
def test_every_version_of_describe_quorum_tells_leader_epoch_and_what_each_voter_has(version: int) -> None:
    answer = quorum(version, [{**LEADER, "peers": PEERS}, *FOLLOWERS])
    [topic] = answer.topics
    [found] = topic.partitions
    assert (int(answer.error_code), topic.topic_name, int(found.error_code)) == (0, "__cluster_metadata", 0)
    assert (found.leader_id, found.leader_epoch, found.high_watermark) == (1, 7, 41)
    assert [(each.replica_id, each.log_end_offset) for each in found.current_voters] == [(1, 42), (2, 42), (3, 31)]
    assert found.observers == ()
    if version >= 1:
        leader, second, third = found.current_voters
        assert leader.last_caught_up_timestamp - second.last_fetch_timestamp == 500
        assert leader.last_fetch_timestamp == -1 and second.last_caught_up_timestamp == second.last_fetch_timestamp
        assert leader.last_caught_up_timestamp - third.last_fetch_timestamp == 2_000
        assert third.last_caught_up_timestamp == -1
    if version >= 2:
        assert [(node.node_id, node.listeners[0].host, node.listeners[0].port) for node in answer.nodes] == [
            (1, "c1", 9001),
            (2, "c2", 9002),
            (3, "c3", 9003),
        ]


def test_a_quorum_without_a_leader_and_other_topics_are_answered_with_errors() -> None:
    assert quorum(2, FOLLOWERS).topics[0].partitions[0].error_code == 5
    assert quorum(2, [{**LEADER, "peers": PEERS}], topic="orders").topics[0].partitions[0].error_code == 3


# --- DescribeTopicPartitions -------------------------------------------------------------------------------------


def pages(world: AdminWorld, names: list[str], limit: int = 2_000, cursor: tuple[str, int] | None = None) -> Any:
    return world.call(
        describe_topics.APIS,
        75,
        0,
        topics=[part(75, 0, "TopicRequest", name=name) for name in names],
        response_partition_limit=limit,
        cursor=None if cursor is None else part(75, 0, "Cursor", topic_name=cursor[0], partition_index=cursor[1]),
    )


def test_topics_are_described_in_the_order_of_names_with_leaders_and_replicas() -> None:
    world = AdminWorld(brokers=(1, 2))
    record = world.topic("b", 2)
    world.topic("a", 1)
    world.controller.open_partitions("b")
    world.controller.set_alive(2, False)
    answer = pages(world, [])
    assert [topic.name for topic in answer.topics] == ["a", "b"]
    described = answer.topics[1]
    assert described.topic_id == uuid.UUID(bytes=record.id)
    states = {
        (one.leader_id, int(one.error_code), one.replica_nodes, one.offline_replicas) for one in described.partitions
    }
    assert states == {(1, 0, (1,), ()), (-1, 5, (2,), (2,))}
    assert all(one.leader_epoch >= 0 and one.isr_nodes == one.replica_nodes for one in described.partitions)
    assert answer.next_cursor is None


def test_a_partition_of_a_replicated_set_is_described_with_its_members_and_who_is_in_sync() -> None:
    world = AdminWorld(brokers=(1, 2, 3))
    world.controller.replicate(2, 1, 2, 3)
    asyncio.run(world.controller.create_topic("t", 1, {}, assignment=[2]))
    world.controller.open_partitions("t")
    world.controller.set_alive(1, False)
    world.controller.put_in_sync(2, 2, 3)

    def described() -> tuple[Any, ...]:
        (one,) = pages(world, ["t"]).topics[0].partitions
        return int(one.error_code), one.leader_id, one.replica_nodes, one.isr_nodes, one.offline_replicas

    assert described() == (0, 2, (2, 1, 3), (2, 3), (1,))
    world.controller.apply(r.BeginElection(2, 1, "test"))
    assert described() == (5, -1, (2, 1, 3), (2, 3), (1,))
    world.controller.promise(2, 2, 3)
    assert described() == (0, 2, (2, 1, 3), (2, 3), (1,))


def test_the_cursor_walks_through_all_partitions_page_by_page() -> None:
    world = AdminWorld()
    for name, partitions in (("a", 3), ("b", 1), ("c", 4)):
        world.topic(name, partitions)
    seen: list[tuple[str, int]] = []
    cursor = None
    for _ in range(20):
        answer = pages(world, [], 2, cursor)
        page = [(topic.name, one.partition_index) for topic in answer.topics for one in topic.partitions]
        assert len(page) <= 2
        seen += page
        if answer.next_cursor is None:
            break
        cursor = (answer.next_cursor.topic_name, answer.next_cursor.partition_index)
    assert seen == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1), ("c", 2), ("c", 3)]


def test_a_limit_below_one_still_makes_progress() -> None:
    world = AdminWorld()
    world.topic("a", 2)
    answer = pages(world, ["a"], 0)
    assert [one.partition_index for one in answer.topics[0].partitions] == [0]
    assert (answer.next_cursor.topic_name, answer.next_cursor.partition_index) == ("a", 1)


def test_an_unknown_topic_is_described_with_3_one_that_cannot_be_with_17_and_a_negative_cursor_is_refused() -> None:
    world = AdminWorld()
    world.topic("a")
    answer = pages(world, ["absent", "a", "a b"])
    assert [(topic.name, int(topic.error_code)) for topic in answer.topics] == [("a", 0), ("a b", 17), ("absent", 3)]
    refused = pages(world, ["a"], cursor=("a", -1))
    assert [int(topic.error_code) for topic in refused.topics] == [42]


# --- DescribeLogDirs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(log_dirs.APIS, 35))
def test_every_version_of_describe_log_dirs_has_one_directory_with_the_partitions_led_here(version: int) -> None:
    world = AdminWorld(node__data_dir="/data")
    for name in ("a", "b"):
        for index in range(world.topic(name, 2).partitions):
            world.partitions.get(name, index)
    (directory,) = world.call(log_dirs.APIS, 35, version, topics=None).results
    assert (int(directory.error_code), directory.log_dir) == (0, "/data")
    sizes = {
        (topic.name, one.partition_index): (one.partition_size, one.offset_lag, one.is_future_key)
        for topic in directory.topics
        for one in topic.partitions
    }
    assert sizes == {(name, index): (1000 + index, 0, False) for name in "ab" for index in (0, 1)}
    if version >= 4:
        assert (directory.total_bytes, directory.usable_bytes) == (-1, -1)


@pytest.mark.parametrize("version", versions(log_dirs.APIS, 34))
def test_a_partition_is_in_the_one_directory_and_cannot_be_in_another(version: int) -> None:
    world = AdminWorld(node__data_dir="/data")
    world.topic("a", 2)
    wanted = {"/data": {"a": [0, 2], "absent": [0]}, "/other": {"a": [1], "absent": [0]}}
    dirs = [
        part(
            34, version, "AlterReplicaLogDir", path=path,
            topics=[
                part(34, version, "AlterReplicaLogDirTopic", name=name, partitions=at) for name, at in topics.items()
            ],
        )
        for path, topics in wanted.items()
    ]  # fmt: skip
    answer = world.call(log_dirs.APIS, 34, version, dirs=dirs)
    found = [
        (topic.topic_name, one.partition_index, int(one.error_code))
        for topic in answer.results
        for one in topic.partitions
    ]
    assert found == [("a", 0, 0), ("a", 2, 3), ("absent", 0, 3), ("a", 1, 57), ("absent", 0, 3)]


def test_only_the_partitions_asked_for_are_in_the_log_directory() -> None:
    world = AdminWorld()
    world.topic("a", 2)
    for index in (0, 1):
        world.partitions.get("a", index)
    wanted = [part(35, 4, "DescribableLogDirTopic", topic=name, partitions=[1, 7]) for name in ("a", "absent")]
    (directory,) = world.call(log_dirs.APIS, 35, 4, topics=wanted).results
    assert [(topic.name, [one.partition_index for one in topic.partitions]) for topic in directory.topics] == [
        ("a", [1])
    ]


# --- UnregisterBroker --------------------------------------------------------------------------------------------


def test_a_broker_is_unregistered_as_it_is_removed() -> None:
    world = AdminWorld(brokers=(1, 2))
    removed: list[int] = []

    async def remove(broker_id: int) -> int:
        if broker_id == 2:
            raise BrokerNotDrained("broker 2 owns 3 partitions", hint="drain it")
        removed.append(broker_id)
        return 0

    answer = world.call(unregister_broker.APIS, 64, 0, broker_id=1)
    assert (int(answer.error_code), answer.error_message) == (42, "this broker cannot remove broker 1")
    world.services.remove_broker = remove
    answer = world.call(unregister_broker.APIS, 64, 0, broker_id=1)
    assert (int(answer.error_code), answer.error_message, removed) == (0, None, [1])
    answer = world.call(unregister_broker.APIS, 64, 0, broker_id=2)
    assert (int(answer.error_code), answer.error_message) == (42, "broker 2 owns 3 partitions (drain it)")
    answer = world.call(unregister_broker.APIS, 64, 0, broker_id=7)
    assert (int(answer.error_code), answer.error_message) == (102, "there is no broker 7")


# --- DescribeProducers -------------------------------------------------------------------------------------------


def test_producers_of_a_partition_are_described_and_others_have_their_error() -> None:
    world = AdminWorld()
    world.topic("t", 1)
    log = world.partitions.get("t", 0)
    log.states = [ProducerInfo(5, 2, 9, 123, -1, 40)]
    wanted = [part(61, 0, "TopicRequest", name=name, partition_indexes=[0, 1]) for name in ("t", "absent")]
    answer = world.call(describe_producers.APIS, 61, 0, topics=wanted)
    codes = {
        (topic.name, one.partition_index): int(one.error_code) for topic in answer.topics for one in topic.partitions
    }
    assert codes == {("t", 0): 0, ("t", 1): 3, ("absent", 0): 3, ("absent", 1): 3}
    (state,) = answer.topics[0].partitions[0].active_producers
    assert (state.producer_id, state.producer_epoch, state.last_sequence, state.last_timestamp) == (5, 2, 9, 123)
    assert (state.coordinator_epoch, state.current_txn_start_offset) == (-1, 40)


def test_producers_are_described_by_the_leader_only() -> None:
    world = AdminWorld(brokers=(1, 2))
    asyncio.run(world.controller.create_topic("t", 1, {}, assignment=[2]))
    wanted = [part(61, 0, "TopicRequest", name="t", partition_indexes=[0])]
    (topic,) = world.call(describe_producers.APIS, 61, 0, topics=wanted).topics
    assert int(topic.partitions[0].error_code) == 6


# --- DeleteRecords -----------------------------------------------------------------------------------------------


def delete(world: AdminWorld, topic: str, version: int = 2, **offsets: int) -> dict[int, tuple[int, int]]:
    partitions = [
        part(21, version, "DeleteRecordsPartition", partition_index=int(index[1:]), offset=offset)
        for index, offset in offsets.items()
    ]
    wanted = [part(21, version, "DeleteRecordsTopic", name=topic, partitions=partitions)]
    (result,) = world.call(delete_records.APIS, 21, version, topics=wanted, timeout=5_000).topics
    return {one.partition_index: (int(one.error_code), one.low_watermark) for one in result.partitions}


@pytest.mark.parametrize("version", versions(delete_records.APIS, 21))
def test_every_version_of_delete_records_returns_the_low_watermark(version: int) -> None:
    world = AdminWorld()
    world.topic("t", 2)
    assert delete(world, "t", version, p0=30, p1=-1) == {0: (0, 30), 1: (0, 100)}


def test_deleting_before_the_log_start_changes_nothing_and_is_success() -> None:
    world = AdminWorld()
    world.topic("t")
    assert delete(world, "t", p0=30) == {0: (0, 30)}
    assert delete(world, "t", p0=10) == {0: (0, 30)}


def test_each_partition_has_its_own_error() -> None:
    world = AdminWorld(brokers=(1, 2))
    asyncio.run(world.controller.create_topic("t", 2, {}, assignment=[1, 2]))
    assert delete(world, "t", p0=101, p1=0, p9=0) == {0: (1, -1), 1: (6, -1), 9: (3, -1)}
    assert delete(world, "t", p0=-2) == {0: (1, -1)}
    assert delete(world, "absent", p0=0) == {0: (3, -1)}


def test_records_of_internal_topics_and_of_compacted_topics_are_not_deleted() -> None:
    world = AdminWorld()
    asyncio.run(world.controller.create_topic("__consumer_offsets", 1, {}, internal=True))
    world.topic("compacted", cleanup_policy="compact")
    world.topic("both", cleanup_policy="compact,delete")
    assert delete(world, "__consumer_offsets", p0=1) == {0: (17, -1)}
    assert delete(world, "compacted", p0=1) == {0: (44, -1)}
    assert delete(world, "both", p0=1) == {0: (0, 1)}
    world.topic("neither", cleanup_policy="")
    assert delete(world, "neither", p0=1) == {0: (0, 1)}


def test_a_deletion_that_does_not_end_is_told_as_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(self: WorldLog, before_offset: int) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(WorldLog, "delete_records", forever)
    monkeypatch.setattr(delete_records, "MIN_BUDGET_MS", 1)
    world = AdminWorld()
    world.topic("t")
    partition = part(21, 2, "DeleteRecordsPartition", partition_index=0, offset=1)
    wanted = [part(21, 2, "DeleteRecordsTopic", name="t", partitions=[partition])]
    (result,) = world.call(delete_records.APIS, 21, 2, topics=wanted, timeout=1).topics
    assert int(result.partitions[0].error_code) == 7


# --- ACLs and quotas ---------------------------------------------------------------------------------------------

ACL = {"resource_type": 2, "principal": "User:a", "host": "*", "operation": 3, "permission_type": 3}
FILTER = {
    "resource_type_filter": 2,
    "resource_name_filter": None,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}


@pytest.mark.parametrize("version", versions(acls.APIS, 29))
def test_acl_requests_of_every_version_answer_security_disabled(version: int) -> None:
    world = AdminWorld()
    described = world.call(acls.APIS, 29, version, **FILTER)
    assert (int(described.error_code), described.resources) == (54, ())
    creations = [part(30, version, "AclCreation", resource_name=name, **ACL) for name in ("a", "b")]
    created = world.call(acls.APIS, 30, version, creations=creations)
    assert [int(result.error_code) for result in created.results] == [54, 54]
    deleted = world.call(acls.APIS, 31, version, filters=[part(31, version, "DeleteAclsFilter", **FILTER)])
    assert [(int(result.error_code), result.matching_acls) for result in deleted.filter_results] == [(54, ())]


@pytest.mark.parametrize("version", versions(acls.APIS, 48))
def test_there_are_no_client_quotas(version: int) -> None:
    answer = AdminWorld().call(acls.APIS, 48, version, components=[], strict=False)
    assert (int(answer.error_code), answer.entries) == (0, ())


# --- Elections and reassignments ---------------------------------------------------------------------------------


def elect(world: AdminWorld, version: int, kind: int, wanted: dict[str, list[int]] | None, timeout: int = 5_000) -> Any:
    topics = wanted and [
        part(43, version, "TopicPartitions", topic=topic, partitions=indexes) for topic, indexes in wanted.items()
    ]
    more = {"election_type": kind} if version >= 1 else {}
    return world.call(elections.APIS, 43, version, topic_partitions=topics, timeout=timeout, **more)


def elected(answer: Any) -> dict[tuple[str, int], int]:
    return {
        (topic.topic, one.partition_id): int(one.error_code)
        for topic in answer.replica_election_results
        for one in topic.partition_result
    }


@pytest.mark.parametrize("version", versions(elections.APIS, 43))
def test_partitions_led_by_their_preferred_broker_need_no_election(version: int) -> None:
    world = AdminWorld()
    world.topic("t", 2)
    assert elected(elect(world, version, 0, {"t": [0, 1, 2]})) == {("t", 0): 84, ("t", 1): 84, ("t", 2): 3}
    assert elected(elect(world, version, 0, None)) == {}


def test_a_preferred_broker_that_is_dead_cannot_be_elected() -> None:
    world = AdminWorld(brokers=(1, 2))
    asyncio.run(world.controller.create_topic("t", 2, {}, assignment=[1, 2]))
    world.controller.set_alive(2, False)
    assert elected(elect(world, 2, 0, {"t": [0, 1]})) == {("t", 0): 84, ("t", 1): 80}
    assert elected(elect(world, 2, 1, {"t": [0, 1]})) == {("t", 0): 84, ("t", 1): 83}
    assert elected(elect(world, 2, 0, None)) == {("t", 1): 80}


def trio(members: tuple[int, ...] = (1, 2, 3)) -> AdminWorld:
    """Replica set 2, led by broker 2, of three; it has two partitions, and replica set 1, of one, a third."""
    world = AdminWorld(brokers=(1, 2, 3))
    world.controller.replicate(2, *members)
    asyncio.run(world.controller.create_topic("t", 3, {}, assignment=[2, 2, 1]))
    return world


def elected_by(world: AdminWorld, *promising: int) -> None:
    """Replica set 2 elects another master, while its preferred one is not alive."""
    world.controller.set_alive(2, False)
    world.controller.apply(r.BeginElection(2, world.controller.image.replica_sets[2].master_epoch, "test"))
    world.controller.promise(2, *promising)
    world.controller.set_alive(2, True)


def promise_at_once(world: AdminWorld, ends: dict[int, int]) -> None:
    """Members with WALs that end here answer each election."""

    def promise() -> None:
        for member, end in ends.items():
            if world.controller.image.replica_sets[2].master < 0:
                world.controller.promise(2, member, end_offset=end)

    def seen(delta: Delta) -> None:
        if any(change.record.master < 0 for change in delta.of("replica_sets")):
            asyncio.get_running_loop().call_soon(promise)

    world.controller.subscribe(seen)


def test_a_preferred_election_of_a_replicated_set_is_one_election_for_all_its_partitions() -> None:
    world = trio()
    assert elected(elect(world, 2, 0, {"t": [0, 1, 2]})) == {("t", index): 84 for index in range(3)}
    elected_by(world, 1, 3)
    image = world.controller.image
    assert image.replica_sets[2].master == 1
    epoch = image.replica_sets[2].master_epoch
    promise_at_once(world, {1: 100, 2: 100, 3: 100})
    assert elected(elect(world, 2, 0, {"t": [0, 1, 2]})) == {("t", 0): 0, ("t", 1): 0, ("t", 2): 84}
    assert (image.replica_sets[2].master, image.replica_sets[2].master_epoch) == (2, epoch + 1)
    assert elected(elect(world, 2, 0, None)) == {}


def test_a_preferred_master_that_is_behind_or_out_of_sync_or_does_not_promise_is_not_available() -> None:
    world = trio()
    elected_by(world, 1, 3)
    promise_at_once(world, {1: 100, 2: 50, 3: 100})
    assert elected(elect(world, 2, 0, {"t": [0, 1]})) == {("t", 0): 80, ("t", 1): 80}
    world.controller.put_in_sync(2, *(each for each in (1, 3)))
    before = world.controller.image.replica_sets[2]
    assert elected(elect(world, 2, 0, {"t": [0]})) == {("t", 0): 80}
    assert world.controller.image.replica_sets[2] == before

    world = trio()
    elected_by(world, 1, 3)
    assert elected(elect(world, 2, 0, {"t": [0, 1]}, timeout=50)) == {("t", 0): 80, ("t", 1): 80}
    promise_at_once(world, {})
    epoch = world.controller.image.replica_sets[2].master_epoch
    assert elected(elect(world, 2, 0, {"t": [0]}, timeout=50)) == {("t", 0): 80}
    assert world.controller.image.replica_sets[2].master_epoch == epoch, "the election that is under way goes on"


def test_an_unclean_election_is_left_to_the_operator() -> None:
    world = trio()
    assert elected(elect(world, 2, 1, {"t": [0]})) == {("t", 0): 84}
    world.controller.apply(r.BeginElection(2, 1, "test"))
    answer = elect(world, 2, 1, {"t": [0]})
    assert elected(answer) == {("t", 0): 83}
    message = answer.replica_election_results[0].partition_result[0].error_message
    assert "tidelog replica-set elect 2 --broker ID --accept-loss" in message
    assert world.controller.image.replica_sets[2].master == -1


def test_an_unknown_kind_of_election_is_an_invalid_request() -> None:
    assert int(elect(AdminWorld(), 2, 5, None).error_code) == 42


def reassign(world: AdminWorld, version: int, topic: str, index: int, replicas: list[int] | None) -> int:
    partition = part(45, version, "ReassignablePartition", partition_index=index, replicas=replicas)
    wanted = [part(45, version, "ReassignableTopic", name=topic, partitions=[partition])]
    answer = world.call(elections.APIS, 45, version, topics=wanted, timeout=5_000)
    assert int(answer.error_code) == 0
    return int(answer.responses[0].partitions[0].error_code)


@pytest.mark.parametrize("version", versions(elections.APIS, 45))
@pytest.mark.parametrize(
    ("index", "replicas", "code"),
    [
        (0, None, 85),
        (0, [1], 0),
        (0, [9], 39),
        (0, [], 39),
        (0, [1, 1], 39),
        (0, [1, 2], 39),
        (0, [2], 0),
        (7, [1], 3),
        (7, None, 3),
    ],
)
def test_a_reassignment_names_one_replica_set_that_lives(
    version: int, index: int, replicas: list[int] | None, code: int
) -> None:
    world = AdminWorld(brokers=(1, 2))
    asyncio.run(world.controller.create_topic("t", 1, {}, assignment=[1]))
    assert reassign(world, version, "t", index, replicas) == code


def test_a_reassignment_to_a_dead_broker_is_refused() -> None:
    world = AdminWorld(brokers=(1, 2))
    world.topic("t", 2)
    world.controller.set_alive(2, False)
    assert reassign(world, 1, "t", 0, [2]) == 39


def reassignments(world: AdminWorld, named: dict[str, list[int]] | None) -> dict[tuple[str, int], tuple[Any, ...]]:
    topics = named and [
        part(46, 0, "ListPartitionReassignmentsTopics", name=name, partition_indexes=indexes)
        for name, indexes in named.items()
    ]
    answer = world.call(elections.APIS, 46, 0, topics=topics, timeout=5_000)
    assert int(answer.error_code) == 0
    return {
        (topic.name, one.partition_index): (one.replicas, one.adding_replicas, one.removing_replicas)
        for topic in answer.topics
        for one in topic.partitions
    }


def test_reassignments_are_listed_until_they_are_cancelled() -> None:
    world = AdminWorld(brokers=(1, 2))
    asyncio.run(world.controller.create_topic("t", 3, {}, assignment=[1, 1, 2]))
    assert reassignments(world, None) == {}
    assert reassign(world, 1, "t", 0, [2]) == reassign(world, 1, "t", 2, [1]) == 0
    first = ((1, 2), (2,), (1,))
    assert reassignments(world, None) == {("t", 0): first, ("t", 2): ((2, 1), (1,), (2,))}
    assert reassignments(world, {"t": [0, 1], "absent": [0]}) == {("t", 0): first}
    assert reassign(world, 1, "t", 0, None) == 0
    assert reassign(world, 1, "t", 0, None) == 85
    assert reassignments(world, {"t": [0]}) == {}


def test_a_reassignment_names_the_members_of_a_replicated_set_its_preferred_master_first() -> None:
    world = trio()
    world.controller.replicate(3, 1, 2, 3)
    assert reassign(world, 1, "t", 2, [2, 3, 1]) == 0
    assert reassign(world, 1, "t", 0, [3, 2, 1]) == 0
    assert reassign(world, 1, "t", 1, [2, 3]) == 39
    assert reassignments(world, None) == {("t", 0): ((2, 1, 3), (), ()), ("t", 2): ((1, 2, 3), (2, 3), ())}


def test_a_reassignment_to_fewer_replicas_than_the_topic_asked_for_is_refused_with_38() -> None:
    world = AdminWorld(brokers=(1, 2, 3))
    world.controller.replicate(2, 1, 2)
    world.controller.replicate(3, 1, 2, 3)
    asyncio.run(world.controller.create_topic("t", 1, {}, replicas=2))
    asyncio.run(world.controller.create_topic("u", 1, {}, assignment=[2]))
    assert reassign(world, 1, "t", 0, [1]) == 38
    assert reassign(world, 1, "t", 0, [3, 1, 2]) == 0
    assert reassign(world, 1, "u", 0, [1]) == 0, "it asked for no number"


def test_an_election_of_a_moving_partition_waits_for_its_owner_to_close_it() -> None:
    world = AdminWorld(brokers=(1, 2))
    asyncio.run(world.controller.create_topic("t", 1, {}, assignment=[1]))
    partition = world.controller.image.partition(world.controller.image.topic_ids["t"], 0)
    assert partition is not None
    streams = tuple((partition.first_stream + step, 1) for step in range(4))
    world.controller.apply(c.OpenStreams(1, 1, streams))
    reassign(world, 1, "t", 0, [2])
    assert elected(elect(world, 2, 0, None)) == {("t", 0): 80}
    world.controller.apply(c.CloseStreams(1, 1, streams))
    assert elected(elect(world, 2, 0, {"t": [0]})) == {("t", 0): 0}
    assert reassignments(world, None) == {}


# --- the table ---------------------------------------------------------------------------------------------------


def test_no_api_is_served_twice() -> None:
    modules: list[list[ApiHandler]] = [
        acls.APIS,
        delete_records.APIS,
        describe_cluster.APIS,
        describe_producers.APIS,
        describe_topics.APIS,
        elections.APIS,
        log_dirs.APIS,
    ]
    keys = [api.api_key for apis in modules for api in apis]
    assert len(keys) == len(set(keys))
