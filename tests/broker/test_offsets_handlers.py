"""OffsetCommit, OffsetFetch and OffsetDelete: every version, as bytes."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from tests.support.group_calls import answer_to, call, part, versions
from tests.support.group_world import Consumer, World
from tests.support.loops import VIRTUAL_LOOP
from tidelog.broker.groups.errors import GroupError as E
from tidelog.broker.kafka.errors import UNKNOWN_TOPIC_ID
from tidelog.broker.kafka.wire.messages.offsets import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)

LOOPS = VIRTUAL_LOOP

COMMIT, FETCH, DELETE = 8, 9, 47
UNKNOWN_ID = uuid.UUID(int=77)


def id_of(world: World, name: str) -> uuid.UUID:
    """The id of a topic, and of one that does not exist."""
    record = world.controller.image.topic(name)
    return uuid.UUID(bytes=record.id) if record is not None else UNKNOWN_ID


def named(world: World, version: int, name: str) -> dict[str, Any]:
    """The field by which a version names a topic."""
    return {"topic_id": id_of(world, name)} if version >= 10 else {"name": name}


def name_of(world: World, topic: Any) -> str:
    """The name of a topic in an answer, which names it by its id from v10 on."""
    if hasattr(topic, "name"):
        return str(topic.name)
    record = world.controller.image.topics.get(topic.topic_id.bytes)
    return record.name if record is not None else "unknown"


async def commit(world: World, version: int, rows: list[tuple[str, int, int, str | None]], **how: Any) -> list[int]:
    """Commit `(topic, partition, offset, metadata)` rows, one topic each; the errors."""
    topics = [
        part(
            COMMIT,
            version,
            "OffsetCommitRequestTopic",
            **named(world, version, topic),
            partitions=[
                part(
                    COMMIT,
                    version,
                    "OffsetCommitRequestPartition",
                    partition_index=partition,
                    committed_offset=offset,
                    committed_leader_epoch=4,
                    committed_metadata=metadata,
                )
            ],
        )
        for topic, partition, offset, metadata in rows
    ]
    fields = {
        "group_id": "g",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "retention_time": -1,
        "topics": topics,
    } | how
    answer = await call(world, COMMIT, version, **fields)
    assert [name_of(world, topic) for topic in answer.topics] == [row[0] for row in rows]
    return [int(topic.partitions[0].error_code) for topic in answer.topics]


async def fetch(world: World, version: int, wanted: dict[str, list[int]] | None, group: str = "g") -> tuple[int, Any]:
    """Fetch one group; its error and `{(topic, partition): (offset, epoch, metadata, error)}`."""
    message = "OffsetFetchRequestTopics" if version >= 8 else "OffsetFetchRequestTopic"
    topics = None
    if wanted is not None:
        topics = [
            part(FETCH, version, message, partition_indexes=at, **named(world, version, name))
            for name, at in wanted.items()
        ]
    if version >= 8:
        groups = [
            part(
                FETCH, version, "OffsetFetchRequestGroup", group_id=one, topics=topics, member_id=None, member_epoch=-1
            )
            for one in (group, "another")
        ]
        answer = await call(world, FETCH, version, groups=groups, require_stable=True)
        assert [one.group_id for one in answer.groups] == [group, "another"]
        answer = answer.groups[0]
    else:
        answer = await call(world, FETCH, version, group_id=group, topics=topics, require_stable=True)
    found = {
        (name_of(world, topic), one.partition_index): (
            one.committed_offset,
            getattr(one, "committed_leader_epoch", None),
            one.metadata,
            int(one.error_code),
        )
        for topic in answer.topics
        for one in topic.partitions
    }
    return int(getattr(answer, "error_code", 0)), found


@pytest.mark.parametrize("version", [2, 3, 4])
async def test_the_longest_retention_that_a_client_may_ask_for_never_ends(version: int) -> None:
    async with World() as world:
        one = OffsetCommitRequestPartition(partition_index=2, committed_offset=7, committed_metadata="")
        topics = (OffsetCommitRequestTopic(name="orders", partitions=(one,)),)
        request = OffsetCommitRequest(
            group_id="g",
            generation_id_or_member_epoch=-1,
            member_id="",
            retention_time_ms=(1 << 63) - 1,
            topics=topics,
        )
        answer = await answer_to(world, COMMIT, version, request)
        assert answer.topics[0].partitions[0].error_code == E.NONE
        _, found = await fetch(world, 9, None)
        assert found["orders", 2][0] == 7


@pytest.mark.parametrize("version", versions(COMMIT))
async def test_what_is_committed_comes_back_with_its_metadata_and_leader_epoch(version: int) -> None:
    async with World() as world:
        rows = [("orders", 2, 1 << 40, "note ü"), ("orders", 3, 0, None)]
        assert await commit(world, version, rows[:1]) == [E.NONE]
        assert await commit(world, version, rows[1:]) == [E.NONE]
        error, found = await fetch(world, 9, None)
        epoch = 4 if version >= 6 else -1
        assert error == 0
        assert found == {
            ("orders", 2): (1 << 40, epoch, "note ü", 0),
            ("orders", 3): (0, epoch, "", 0),
        }
        await world.restart()
        assert await fetch(world, 9, None) == (error, found)


@pytest.mark.parametrize("version", versions(COMMIT))
async def test_what_is_refused_is_refused_by_partition(version: int) -> None:
    async with World(offset_metadata_max_bytes=10) as world:
        rows = [
            ("orders", 0, 1, "x" * 11),
            ("orders", 8, 1, None),
            ("unknown", 0, 1, None),
            ("orders", 1, 1, "x" * 10),
        ]
        unknown = E.UNKNOWN_TOPIC_OR_PARTITION if version < 10 else UNKNOWN_TOPIC_ID
        errors = [E.OFFSET_METADATA_TOO_LARGE, E.UNKNOWN_TOPIC_OR_PARTITION, unknown, E.NONE]
        assert await commit(world, version, rows) == errors
        assert (await fetch(world, 9, None))[1].keys() == {("orders", 1)}
        member = Consumer(world)
        await member.run_round()
        row = rows[3:]
        assert await commit(world, version, row) == [E.UNKNOWN_MEMBER_ID]
        how = {"generation_id_or_member_epoch": 7, "member_id": member.member_id}
        assert await commit(world, version, row, **how) == [E.ILLEGAL_GENERATION]
        how = {"generation_id_or_member_epoch": 1, "member_id": member.member_id}
        assert await commit(world, version, row, **how) == [E.NONE]
        world.partitions.close(0)
        assert await commit(world, version, row) == [E.NOT_COORDINATOR]


@pytest.mark.parametrize("version", range(2, 5))
async def test_a_retention_that_the_client_asks_for_is_kept(version: int) -> None:
    async with World(offsets_check_interval_ms=1_000) as world:
        assert await commit(world, version, [("orders", 0, 1, None)], retention_time=30_000) == [E.NONE]
        assert await commit(world, version, [("orders", 1, 1, None)]) == [E.NONE]
        await asyncio.sleep(29)
        assert len((await fetch(world, 9, None))[1]) == 2
        await asyncio.sleep(2)
        assert (await fetch(world, 9, None))[1].keys() == {("orders", 1)}


@pytest.mark.parametrize("version", versions(FETCH))
async def test_fetching(version: int) -> None:
    async with World() as world:
        await commit(world, 9, [("orders", 2, 17, "m")])
        epoch = (lambda value: value) if version >= 5 else (lambda _: None)
        error, found = await fetch(world, version, {"orders": [1, 2], "unknown": [0]})
        assert error == 0
        assert found == {
            ("orders", 1): (-1, epoch(-1), "", 0),
            ("orders", 2): (17, epoch(4), "m", 0),
            ("unknown", 0): (-1, epoch(-1), "", 0 if version < 10 else UNKNOWN_TOPIC_ID),
        }
        assert await fetch(world, version, {"orders": [2]}, "nobody") == (
            0,
            {("orders", 2): (-1, epoch(-1), "", 0)},
        )
        if version >= 2:
            assert (await fetch(world, version, None))[1] == {("orders", 2): (17, epoch(4), "m", 0)}
            assert await fetch(world, version, {}) == (0, {})
        world.partitions.close(0)
        error, found = await fetch(world, version, {"orders": [2]})
        if version >= 2:
            assert error == E.NOT_COORDINATOR
        if version < 8:
            assert found == {("orders", 2): (-1, epoch(-1), "", E.NOT_COORDINATOR)}


async def test_topic_ids_are_those_of_the_topics_that_exist_now() -> None:
    async with World() as world:
        await commit(world, 10, [("orders", 2, 17, "m")])
        old = id_of(world, "orders")
        world.controller.delete_topic(world.topic)
        world.controller.add_topic("orders", 8)
        assert id_of(world, "orders") != old
        assert await fetch(world, 10, {"orders": [2]}) == (0, {("orders", 2): (-1, -1, "", 0)})
        assert (await fetch(world, 10, None))[1] == {}
        partitions = [part(FETCH, 10, "OffsetFetchRequestTopics", topic_id=old, partition_indexes=[2, 3])]
        group = part(
            FETCH, 10, "OffsetFetchRequestGroup", group_id="g", topics=partitions, member_id=None, member_epoch=-1
        )
        (answer,) = (await call(world, FETCH, 10, groups=[group], require_stable=False)).groups
        assert [(topic.topic_id, [int(one.error_code) for one in topic.partitions]) for topic in answer.topics] == [
            (old, [UNKNOWN_TOPIC_ID] * 2)
        ]


async def test_a_topic_that_is_named_twice_is_answered_whole() -> None:
    async with World() as world:
        topics = [part(FETCH, 7, "OffsetFetchRequestTopic", name="orders", partition_indexes=[at]) for at in (1, 2)]
        answer = await call(world, FETCH, 7, group_id="g", topics=topics, require_stable=True)
        assert [one.partition_index for topic in answer.topics for one in topic.partitions] == [1, 2]


async def test_the_empty_group_id_may_keep_offsets_as_in_kafka() -> None:
    async with World() as world:
        assert await commit(world, 9, [("orders", 0, 5, None)], group_id="") == [E.NONE]
        assert (await fetch(world, 9, None, ""))[1][("orders", 0)][0] == 5


async def test_deleting_offsets() -> None:
    async with World() as world:
        await commit(world, 9, [("orders", 0, 5, None)])

        async def delete(group: str) -> tuple[int, dict[tuple[str, int], int]]:
            partitions = [part(DELETE, 0, "OffsetDeleteRequestPartition", partition_index=at) for at in (0, 1, 8)]
            topics = [part(DELETE, 0, "OffsetDeleteRequestTopic", name="orders", partitions=partitions)]
            answer = await call(world, DELETE, 0, group_id=group, topics=topics)
            return int(answer.error_code), {
                (topic.name, one.partition_index): int(one.error_code)
                for topic in answer.topics
                for one in topic.partitions
            }

        assert await delete("nobody") == (E.GROUP_ID_NOT_FOUND, {})
        assert await delete("") == (E.INVALID_GROUP_ID, {})
        assert await delete("g") == (
            0,
            {("orders", 0): 0, ("orders", 1): 0, ("orders", 8): E.UNKNOWN_TOPIC_OR_PARTITION},
        )
        assert (await fetch(world, 9, None))[1] == {}
