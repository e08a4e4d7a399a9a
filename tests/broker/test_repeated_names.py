"""A request that names one thing again and again costs what it names, not thousands of times itself."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.broker.test_admin_cluster import LEADER, PEERS
from tests.broker.test_handlers_metadata import ask
from tests.support.admin_world import AdminWorld, part
from tests.support.group_calls import call
from tests.support.group_calls import part as group_part
from tests.support.group_world import World
from tests.support.kafka_world import KafkaWorld
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.kafka.handlers import configs, describe_producers, describe_quorum, elections, log_dirs
from tidelog.broker.kafka.handlers.admin_errors import CONCURRENCY, each
from tidelog.stream.partition_log import ProducerInfo

DESCRIBE_CONFIGS, DESCRIBE_GROUPS, OFFSET_FETCH, FIND, PRODUCERS, QUORUM = 32, 15, 9, 10, 61, 55
ELECT, LOG_DIRS = 43, 35
TOPIC = 2
AGAIN = 50


async def test_a_topic_is_answered_once_by_name_and_by_id() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 3)
        await world.topic("u", 1)
        for version in (0, 8, 13):
            answer = await ask(client, version, ["t", "u", "absent"] * AGAIN)
            assert [each.name for each in answer.topics] == ["t", "u", "absent"]
        ids = [found.topic_id for found in answer.topics if found.name == "t"] * AGAIN
        answer = await ask(client, 13, ids)
        assert [each.topic_id.bytes for each in answer.topics] == [topic.id]


def test_a_resource_is_described_once() -> None:
    world = AdminWorld()
    world.topic("t", 1)
    wanted = [
        part(
            DESCRIBE_CONFIGS, 4, "DescribeConfigsResource", resource_type=TOPIC, resource_name=name,
            configuration_keys=keys,
        )
        for name, keys in (("t", None), ("absent", None), ("t", ["segment.ms"]))
    ]  # fmt: skip
    answer = world.call(
        configs.APIS, DESCRIBE_CONFIGS, 4, resources=wanted * AGAIN, include_synonyms=True, include_documentation=True
    )
    assert [(one.resource_name, int(one.error_code)) for one in answer.results] == [("t", 0), ("absent", 3), ("t", 0)]
    assert len(answer.results[0].configs) > len(answer.results[2].configs) == 1


def test_the_producers_of_a_partition_are_described_once() -> None:
    world = AdminWorld()
    world.topic("t", 2)
    world.partitions.get("t", 0).states = [ProducerInfo(5, 2, 9, 123, -1, 40)]
    wanted = [part(PRODUCERS, 0, "TopicRequest", name="t", partition_indexes=at * AGAIN) for at in ([0, 1], [1, 0])]
    answer = world.call(describe_producers.APIS, PRODUCERS, 0, topics=wanted * AGAIN)
    assert [(topic.name, [one.partition_index for one in topic.partitions]) for topic in answer.topics] == [
        ("t", [0, 1])
    ]
    assert len(answer.topics[0].partitions[0].active_producers) == 1


def test_the_quorum_is_described_once() -> None:
    world = AdminWorld()

    async def report() -> dict[str, Any]:
        return {"members": [{**LEADER, "peers": PEERS}], "problems": []}

    world.services.quorum = report
    partitions = (part(QUORUM, 2, "PartitionData", partition_index=0),) * AGAIN
    asked = part(QUORUM, 2, "TopicData", topic_name="__cluster_metadata", partitions=partitions)
    answer = world.call(describe_quorum.APIS, QUORUM, 2, topics=(asked,) * AGAIN)
    assert [len(topic.partitions) for topic in answer.topics] == [1]


def test_all_partitions_of_a_topic_that_is_named_again_count() -> None:
    world = AdminWorld()
    for name in ("t", "u"):
        for index in range(world.topic(name, 2).partitions):
            world.partitions.get(name, index)
    named = [("t", [0, 0]), ("u", [1]), ("t", [1, 0])]
    wanted = [part(ELECT, 2, "TopicPartitions", topic=name, partitions=at) for name, at in named]
    elected = world.call(elections.APIS, ELECT, 2, topic_partitions=wanted, timeout=1_000, election_type=0)
    results = elected.replica_election_results
    assert [(topic.topic, [one.partition_id for one in topic.partition_result]) for topic in results] == [
        ("t", [0, 1]),
        ("u", [1]),
    ]
    wanted = [part(LOG_DIRS, 4, "DescribableLogDirTopic", topic=name, partitions=at) for name, at in named]
    (directory,) = world.call(log_dirs.APIS, LOG_DIRS, 4, topics=wanted).results
    assert [(topic.name, [one.partition_index for one in topic.partitions]) for topic in directory.topics] == [
        ("t", [0, 1]),
        ("u", [1]),
    ]


async def test_groups_and_coordinators_are_told_once_and_offsets_of_a_repeated_group_are_refused() -> None:
    async with World() as world:
        answer = await call(world, DESCRIBE_GROUPS, 5, groups=["g", "h"] * AGAIN, include_authorized_operations=False)
        assert [one.group_id for one in answer.groups] == ["g", "h"]
        found = await call(world, FIND, 4, key_type=0, coordinator_keys=["g", "h"] * AGAIN)
        assert [one.key for one in found.coordinators] == ["g", "h"]
        wanted = [
            group_part(
                OFFSET_FETCH, 9, "OffsetFetchRequestGroup", group_id=name, topics=None, member_id=str(at),
                member_epoch=-1,
            )
            for at, name in enumerate(["g", "h", *["g"] * AGAIN])
        ]  # fmt: skip
        offsets = await call(world, OFFSET_FETCH, 9, groups=wanted, require_stable=False)
        told = [(one.group_id, int(one.error_code)) for one in offsets.groups]
        assert told == [("g", GroupError.INVALID_REQUEST), ("h", 0)]


async def test_many_items_are_worked_on_by_few_tasks_and_keep_their_order() -> None:
    most = 0

    async def work(item: int) -> int:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0)
        return item * 2

    before = len(asyncio.all_tasks())
    assert await each(range(1_000), work) == [item * 2 for item in range(1_000)]
    assert most - before <= CONCURRENCY
    assert await each([], work) == []
