"""Ids that no record can hold are refused before they cost anything; long ones do not count for each partition."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.test_handlers_produce import outcome, produce
from tests.broker.test_partition_manager import world as world_of_partitions
from tests.broker.test_produce_transactions import transactional
from tests.support.admin_world import AdminWorld
from tests.support.admin_world import part as part_of
from tests.support.group_calls import call, part
from tests.support.group_world import World
from tests.support.kafka_world import KafkaWorld
from tidelog.broker.coordinators import topic as coordinator_topic
from tidelog.broker.groups.errors import GroupError as E
from tidelog.broker.kafka.handlers import elections
from tidelog.broker.partitions import topic_config
from tidelog.runtime.errors import NotFound

OFFSET_COMMIT, OFFSET_FETCH, FIND, HEARTBEAT, LEAVE, TXN_OFFSET_COMMIT = 8, 9, 10, 12, 13, 28
ELECT_LEADERS = 43
LONG = "g" * 40_000


@pytest.fixture(autouse=True)
def only_short_ids_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash takes 0.15 s for a million characters, and nobody else is served meanwhile."""
    original = coordinator_topic.java_hash

    def checked(text: str) -> int:
        assert len(text) <= coordinator_topic.MAX_KEY_CHARS
        return original(text)

    monkeypatch.setattr(coordinator_topic, "java_hash", checked)


async def test_an_id_that_no_record_can_hold_is_refused_at_once() -> None:
    async with World() as world:
        found = await call(world, FIND, 4, key_type=0, coordinator_keys=[LONG])
        assert int(found.coordinators[0].error_code) == E.INVALID_REQUEST
        member: dict[str, Any] = {"group_id": LONG, "generation_id": 1, "member_id": "m", "group_instance_id": None}
        assert (await call(world, HEARTBEAT, 4, **member)).error_code == E.INVALID_GROUP_ID
        leaving = part(LEAVE, 4, "MemberIdentity", member_id="m", group_instance_id=None)
        assert (await call(world, LEAVE, 4, group_id=LONG, members=[leaving])).error_code == E.INVALID_GROUP_ID
        fetched = await call(world, OFFSET_FETCH, 7, group_id=LONG, topics=None, require_stable=False)
        assert int(fetched.error_code) != 0


def commit_of(api_key: int, version: int, partitions: int) -> list[Any]:
    named = "OffsetCommitRequest" if api_key == OFFSET_COMMIT else "TxnOffsetCommitRequest"
    one = part(
        api_key, version, f"{named}Partition", partition_index=0, committed_offset=1, committed_leader_epoch=-1,
        committed_metadata=None,
    )  # fmt: skip
    return [part(api_key, version, f"{named}Topic", name="orders", partitions=[one] * partitions)]


async def test_a_commit_whose_records_would_be_thousands_of_times_the_request_is_refused() -> None:
    """Each has the id of its group: 65,000 of them would take 2 GB."""
    async with World() as world:
        group: dict[str, Any] = {"group_id": "g" * 30_000, "member_id": "", "group_instance_id": None}
        producer: dict[str, Any] = {"transactional_id": "tx", "producer_id": 1, "producer_epoch": 0}
        for partitions, code in ((1_500, E.INVALID_COMMIT_OFFSET_SIZE), (3, E.NONE)):
            topics = commit_of(OFFSET_COMMIT, 8, partitions)
            answer = await call(world, OFFSET_COMMIT, 8, **group, generation_id_or_member_epoch=-1, topics=topics)
            assert {int(one.error_code) for one in answer.topics[0].partitions} == {code}
            topics = commit_of(TXN_OFFSET_COMMIT, 3, partitions)
            answer = await call(world, TXN_OFFSET_COMMIT, 3, **group, **producer, generation_id=-1, topics=topics)
            assert {int(one.error_code) for one in answer.topics[0].partitions} == {code}


async def test_an_error_of_a_partition_does_not_repeat_a_long_transactional_id() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.transactions.script = [48]
        answer = await produce(client, 9, {"t": {0: transactional()}}, transactional_id="x" * 1_000_000)
        assert outcome(answer).error_code == 48
        assert len(outcome(answer).error_message) < 1_000


async def test_an_error_of_a_partition_does_not_repeat_a_long_topic_name() -> None:
    """A request with a name of a megabyte may name 65,000 partitions."""
    async with world_of_partitions() as world:
        with pytest.raises(NotFound) as caught:
            world.partitions.get("x" * 30_000, 1)
        assert len(str(caught.value)) < 1_000


def test_the_elections_of_a_long_topic_name_do_not_repeat_it() -> None:
    world = AdminWorld()
    wanted = [part_of(ELECT_LEADERS, 2, "TopicPartitions", topic="x" * 30_000, partitions=[0, 1])]
    answer = world.call(elections.APIS, ELECT_LEADERS, 2, topic_partitions=wanted, timeout=1_000, election_type=0)
    for one in answer.replica_election_results[0].partition_result:
        assert one.error_code == E.UNKNOWN_TOPIC_OR_PARTITION and len(one.error_message) < 1_000


def test_no_config_is_looked_for_that_is_near_to_a_long_name() -> None:
    """That takes 0.1 s for a million characters."""
    assert topic_config.nearest("retention.m", topic_config.TOPIC_CONFIGS) == "retention.ms"
    assert topic_config.nearest("retention.ms" * 1_000_000, ["retention.ms" * 1_000_000]) is None
