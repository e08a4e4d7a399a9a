"""CreateTopics, DeleteTopics, CreatePartitions."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import pytest

from tests.support.admin_world import AdminWorld, part, versions
from tidelog.broker.kafka.handlers import topics
from tidelog.broker.partitions.topic_config import INTERNAL_TOPICS, TOPIC_CONFIGS
from tidelog.controller.model import commands as c
from tidelog.controller.model.topic_replicas import topic_replicas
from tidelog.runtime.errors import Unavailable

CREATE, DELETE, GROW = 19, 20, 37


def creatable(version: int, name: str, partitions: int = 1, factor: int = 1, **more: Any) -> Any:
    overrides = more.get("configs", {}).items()
    configs = [part(CREATE, version, "CreatableTopicConfig", name=key, value=value) for key, value in overrides]
    assignments = [
        part(CREATE, version, "CreatableReplicaAssignment", partition_index=index, broker_ids=list(brokers))
        for index, brokers in more.get("assignments", {}).items()
    ]
    return part(
        CREATE,
        version,
        "CreatableTopic",
        name=name,
        num_partitions=partitions,
        replication_factor=factor,
        assignments=assignments,
        configs=configs,
    )


def create(world: AdminWorld, *wanted: Any, version: int = 7, **fields: Any) -> dict[str, Any]:
    fields = {"timeout": 5_000, "validate_only": False, **fields}
    answer = world.call(topics.APIS, CREATE, version, topics=list(wanted), **fields)
    return {result.name: result for result in answer.topics}


def refusal(world: AdminWorld, topic: Any) -> tuple[int, str]:
    (result,) = create(world, topic).values()
    return int(result.error_code), result.error_message or ""


@pytest.mark.parametrize("version", versions(topics.APIS, CREATE))
def test_every_version_of_create_topics_creates_a_topic(version: int) -> None:
    world = AdminWorld()
    result = create(world, creatable(version, "t", 3, configs={"retention.ms": "1000"}), version=version)["t"]
    record = world.controller.image.topic("t")
    assert record is not None
    assert (record.partitions, record.configs, int(result.error_code)) == (3, {"retention.ms": "1000"}, 0)
    if version >= 5:
        assert (result.num_partitions, result.replication_factor) == (3, 1)
        values = {config.name: (config.value, config.config_source) for config in result.configs}
        assert set(values) == set(TOPIC_CONFIGS)
        assert values["retention.ms"] == ("1000", 1)
        assert values["segment.bytes"] == ("1073741824", 5)
    if version >= 7:
        assert result.topic_id == uuid.UUID(bytes=record.id)


def test_minus_one_means_the_defaults() -> None:
    world = AdminWorld()
    result = create(world, creatable(7, "t", -1, -1))["t"]
    assert (int(result.error_code), result.num_partitions, result.replication_factor) == (0, 4, 1)


def test_validate_only_creates_nothing_and_still_checks() -> None:
    world = AdminWorld()
    results = create(world, creatable(7, "good", 2), creatable(7, "bad", 0), validate_only=True)
    assert int(results["good"].error_code) == 0
    assert results["good"].num_partitions == 2
    assert results["good"].topic_id is None
    assert int(results["bad"].error_code) == 37
    assert not world.controller.image.topics


def test_an_existing_topic_is_refused_with_36() -> None:
    world = AdminWorld()
    world.topic("t")
    assert refusal(world, creatable(7, "t"))[0] == 36


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ü", "x" * 250])
def test_an_illegal_name_is_refused_with_17(name: str) -> None:
    assert refusal(AdminWorld(), creatable(7, name))[0] == 17


@pytest.mark.parametrize("partitions", [0, -2])
def test_a_partition_count_that_is_not_positive_is_refused_with_37(partitions: int) -> None:
    assert refusal(AdminWorld(), creatable(7, "t", partitions))[0] == 37


@pytest.mark.parametrize("factor", [0, -2])
def test_a_replication_factor_below_one_is_refused_with_38(factor: int) -> None:
    code, message = refusal(AdminWorld(), creatable(7, "t", 1, factor))
    assert code == 38
    assert "at least 1, or -1 for the default" in message


def replicated() -> AdminWorld:
    """Brokers 1 to 4: set 1 has one member, set 2 two, sets 3 and 4 three."""
    world = AdminWorld(brokers=(1, 2, 3, 4))
    world.controller.replicate(2, 1, 2)
    world.controller.replicate(3, 1, 2, 3, learner=4)
    world.controller.replicate(4, 2, 3, 4)
    return world


def sets_of(world: AdminWorld, name: str) -> list[int]:
    image = world.controller.image
    return [partition.replica_set for partition in image.partitions(image.topic_ids[name])]


@pytest.mark.parametrize(("factor", "given", "sets"), [(-1, 1, {1, 2, 3, 4}), (1, 1, {1}), (2, 2, {2}), (3, 3, {3, 4})])
def test_a_topic_is_placed_on_the_smallest_sets_that_give_its_replication_factor(
    factor: int, given: int, sets: set[int]
) -> None:
    world = replicated()
    (only_checked,) = create(world, creatable(7, "t", 4, factor), validate_only=True).values()
    (result,) = create(world, creatable(7, "t", 4, factor)).values()
    assert (int(result.error_code), result.replication_factor, only_checked.replication_factor) == (0, given, given)
    assert set(sets_of(world, "t")) == sets


def test_more_replicas_than_the_largest_set_has_are_refused_with_38_and_what_to_do() -> None:
    code, message = refusal(replicated(), creatable(7, "t", 1, 4))
    assert code == 38
    assert "replication factor 4: the largest replica set that takes partitions has 3" in message
    assert "replication.total_replicas" in message
    assert refusal(AdminWorld(level=1), creatable(7, "t", 1, 2))[0] == 38


def test_a_topic_that_asks_for_one_replica_has_three_where_every_set_has_three() -> None:
    world = AdminWorld(brokers=(1, 2, 3))
    for each in (1, 2, 3):
        world.controller.replicate(each, 1, 2, 3)
    (result,) = create(world, creatable(7, "t", 1, 1)).values()
    assert (int(result.error_code), result.replication_factor) == (0, 3)


def test_a_topic_grows_on_sets_that_have_as_many_replicas_as_it_has() -> None:
    world = replicated()
    create(world, creatable(7, "t", 2, 3))
    assert grow(world, 3, growable(3, "t", 6)) == {"t": (0, "")}
    assert set(sets_of(world, "t")) == {3, 4}


def test_a_manual_assignment_names_the_members_of_a_replica_set() -> None:
    world = replicated()
    assignments = {0: [3, 1, 2], 1: [1, 2, 3], 2: [4, 2, 3], 3: [2, 1], 4: [1], 5: [4]}
    (result,) = create(world, creatable(7, "t", -1, -1, assignments=assignments)).values()
    assert (int(result.error_code), result.replication_factor) == (0, 1)
    assert sets_of(world, "t") == [3, 3, 4, 2, 1, 4]
    create(world, creatable(7, "v", -1, -1, assignments={0: [3, 1, 2], 1: [2, 1]}))
    image = world.controller.image
    asked = [topic_replicas(image.kv, image.topic_ids[name]) for name in ("t", "v")]
    assert asked == [1, 2], "the smallest number of brokers that are named"
    code, message = refusal(world, creatable(7, "u", -1, -1, assignments={0: [1, 3]}))
    assert code == 39 and "partition 0: no replica set has the members [1, 3]" in message
    assert grow(world, 3, growable(3, "t", 7, [[4, 3, 2]])) == {"t": (0, "")}
    assert sets_of(world, "t")[6] == 4


def test_a_wrong_config_value_is_refused_with_40_and_names_the_config() -> None:
    code, message = refusal(AdminWorld(), creatable(7, "t", configs={"retention.ms": "soon"}))
    assert code == 40
    assert "retention.ms" in message


def test_an_unknown_config_is_refused_with_40_and_the_nearest_name() -> None:
    code, message = refusal(AdminWorld(), creatable(7, "t", configs={"retension.ms": "1"}))
    assert code == 40
    assert "did you mean retention.ms?" in message


def test_a_null_config_value_is_refused_with_40() -> None:
    assert refusal(AdminWorld(), creatable(7, "t", configs={"retention.ms": None}))[0] == 40


def test_a_topic_named_twice_is_refused_once_and_the_others_are_created() -> None:
    world = AdminWorld()
    results = create(world, creatable(7, "twice"), creatable(7, "twice"), creatable(7, "once"))
    assert {name: int(result.error_code) for name, result in results.items()} == {"twice": 42, "once": 0}
    assert world.controller.image.topic("twice") is None


def test_a_manual_assignment_places_partitions_on_the_brokers_named() -> None:
    world = AdminWorld(brokers=(1, 2))
    results = create(world, creatable(7, "t", -1, -1, assignments={1: [1], 0: [2]}))
    assert int(results["t"].error_code) == 0
    image = world.controller.image
    assert [image.leader(one)[0] for one in image.partitions(image.topic_ids["t"])] == [2, 1]


@pytest.mark.parametrize(
    ("assignments", "code"),
    [
        ({0: [9]}, 39),
        ({1: [1]}, 39),
        ({0: []}, 39),
        ({0: [1, 1]}, 39),
        ({0: [1, 2]}, 39),
    ],
)
def test_a_manual_assignment_that_cannot_be_met_is_refused(assignments: dict[int, list[int]], code: int) -> None:
    world = AdminWorld(brokers=(1, 2))
    assert refusal(world, creatable(7, "t", -1, -1, assignments=assignments))[0] == code


def test_a_manual_assignment_with_counts_is_an_invalid_request() -> None:
    assert refusal(AdminWorld(), creatable(7, "t", 1, -1, assignments={0: [1]}))[0] == 42


def test_a_topic_with_an_internal_name_becomes_internal() -> None:
    world = AdminWorld()
    create(world, creatable(7, "__consumer_offsets"))
    record = world.controller.image.topic("__consumer_offsets")
    assert record is not None
    assert record.internal


def test_the_answer_waits_until_the_partitions_led_here_are_open() -> None:
    world = AdminWorld(lag=5)
    create(world, creatable(7, "t", 2))
    assert [log.partition for log in world.partitions.all()] == [0, 1]


def test_partitions_that_do_not_open_in_time_do_not_fail_the_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "MIN_BUDGET_MS", 20)
    world = AdminWorld(lag=1_000_000)
    result = create(world, creatable(7, "t"), timeout=1)["t"]
    assert int(result.error_code) == 0


def test_partitions_of_other_brokers_are_not_waited_for() -> None:
    world = AdminWorld(brokers=(1, 2), lag=1_000_000)
    result = create(world, creatable(7, "t", -1, -1, assignments={0: [2]}), timeout=3_600_000)["t"]
    assert int(result.error_code) == 0


async def test_a_controller_that_does_not_answer_is_told_as_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "MIN_BUDGET_MS", 20)
    world = AdminWorld()
    world.controller.gate = asyncio.Event()
    answer = await world.acall(topics.APIS, CREATE, 7, topics=[creatable(7, "t")], timeout=1, validate_only=False)
    assert [int(result.error_code) for result in answer.topics] == [7]


# --- DeleteTopics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(topics.APIS, DELETE))
def test_every_version_of_delete_topics_deletes_by_name(version: int) -> None:
    world = AdminWorld()
    record = world.topic("t")
    world.topic("kept")
    if version >= 6:
        named = [part(DELETE, version, "DeleteTopicState", name=name, topic_id=None) for name in ("t", "absent")]
        answer = world.call(topics.APIS, DELETE, version, topics=named, timeout=5_000)
    else:
        answer = world.call(topics.APIS, DELETE, version, topic_names=["t", "absent"], timeout=5_000)
    assert {result.name: int(result.error_code) for result in answer.responses} == {"t": 0, "absent": 3}
    assert list(world.controller.image.topic_ids) == ["kept"]
    if version >= 6:
        assert answer.responses[0].topic_id == uuid.UUID(bytes=record.id)


CREATED = c.CreateTopic(bytes(16), "t", 1, {}, False, False, None)


def delete(world: AdminWorld, *wanted: tuple[str | None, uuid.UUID | None]) -> list[tuple[str | None, int]]:
    states = [part(DELETE, 6, "DeleteTopicState", name=name, topic_id=topic_id) for name, topic_id in wanted]
    answer = world.call(topics.APIS, DELETE, 6, topics=states, timeout=5_000)
    return [(result.name, int(result.error_code)) for result in answer.responses]


def test_a_topic_is_deleted_by_id_and_named_in_the_answer() -> None:
    world = AdminWorld()
    record = world.topic("t")
    assert delete(world, (None, uuid.UUID(bytes=record.id))) == [("t", 0)]
    assert not world.controller.image.topics


def test_an_unknown_topic_id_is_refused_with_100() -> None:
    assert delete(AdminWorld(), (None, uuid.UUID(int=99))) == [(None, 100)]


def test_name_and_id_together_or_neither_are_invalid_requests() -> None:
    world = AdminWorld()
    record = world.topic("t")
    both, neither = delete(world, ("t", uuid.UUID(bytes=record.id)), (None, None))
    assert (both[1], neither[1]) == (42, 42)
    assert world.controller.image.topic("t") is not None


def test_a_topic_deleted_twice_in_one_request_is_an_invalid_request_and_stays() -> None:
    world = AdminWorld()
    world.topic("t")
    assert delete(world, ("t", None), ("t", None)) == [("t", 42)]
    assert world.controller.image.topic("t") is not None


def test_internal_topics_may_be_deleted_as_in_kafka() -> None:
    world = AdminWorld()
    create(world, creatable(7, "__consumer_offsets"))
    assert delete(world, ("__consumer_offsets", None)) == [("__consumer_offsets", 0)]


# --- CreatePartitions --------------------------------------------------------------------------------------------


def grow(world: AdminWorld, version: int, *wanted: Any, validate_only: bool = False) -> dict[str, tuple[int, str]]:
    answer = world.call(topics.APIS, GROW, version, topics=list(wanted), timeout=5_000, validate_only=validate_only)
    return {result.name: (int(result.error_code), result.error_message or "") for result in answer.results}


def growable(version: int, name: str, count: int, assignments: list[list[int]] | None = None) -> Any:
    placed = assignments and [part(GROW, version, "CreatePartitionsAssignment", broker_ids=ids) for ids in assignments]
    return part(GROW, version, "CreatePartitionsTopic", name=name, count=count, assignments=placed)


@pytest.mark.parametrize("version", versions(topics.APIS, GROW))
def test_every_version_of_create_partitions_grows_a_topic_and_returns_results(version: int) -> None:
    world = AdminWorld(lag=3)
    record = world.topic("t", 2)
    assert grow(world, version, growable(version, "t", 5), growable(version, "absent", 2)) == {
        "t": (0, ""),
        "absent": (3, "topic 'absent' does not exist"),
    }
    assert world.controller.image.topics[record.id].partitions == 5
    assert len(list(world.partitions.all())) == 5


@pytest.mark.parametrize("count", [3, 2, 0, -1])
def test_a_count_that_is_not_larger_is_refused_with_37(count: int) -> None:
    world = AdminWorld()
    world.topic("t", 3)
    code, message = grow(world, 3, growable(3, "t", count))["t"]
    assert code == 37
    assert "has 3 partitions" in message


@pytest.mark.parametrize("name", sorted(INTERNAL_TOPICS))
@pytest.mark.parametrize("validate_only", [False, True])
def test_internal_topics_keep_their_partitions(name: str, validate_only: bool) -> None:
    world = AdminWorld()
    record = world.topic(name, 2)
    code, message = grow(world, 3, growable(3, name, 3), validate_only=validate_only)[name]
    assert code == 37
    assert "keeps its 2 partitions" in message
    assert world.controller.image.topics[record.id].partitions == 2


def test_validate_only_adds_no_partitions() -> None:
    world = AdminWorld()
    record = world.topic("t", 1)
    assert grow(world, 3, growable(3, "t", 2), validate_only=True)["t"][0] == 0
    assert world.controller.image.topics[record.id].partitions == 1


def test_a_topic_grown_twice_in_one_request_is_an_invalid_request() -> None:
    world = AdminWorld()
    world.topic("t", 1)
    assert grow(world, 3, growable(3, "t", 2), growable(3, "t", 3))["t"][0] == 42


@pytest.mark.parametrize(
    ("assignments", "code"), [([[1], [2]], 0), ([[1]], 39), ([[1], [9]], 39), ([[1], [1, 2]], 39), ([[1], []], 39)]
)
def test_new_partitions_follow_a_manual_assignment_or_are_refused(assignments: list[list[int]], code: int) -> None:
    world = AdminWorld(brokers=(1, 2))
    record = world.topic("t", 1)
    assert grow(world, 3, growable(3, "t", 3, assignments))["t"][0] == code
    if code == 0:
        image = world.controller.image
        assert [image.leader(one)[0] for one in image.partitions(record.id)][1:] == [1, 2]


def test_topics_that_another_broker_has_created_are_grown_and_deleted() -> None:
    world = AdminWorld()
    old, new = (msgspec.structs.replace(CREATED, topic_id=bytes([number]) * 16) for number in (1, 2))
    world.controller.late = []
    world.controller.apply(old)
    assert grow(world, 3, growable(3, "t", 2)) == {"t": (0, "")}
    world.controller.apply(c.DeleteTopic(old.topic_id))
    world.controller.apply(new)
    assert delete(world, ("t", None)) == [("t", 0)]
    assert not world.controller.image.topics


def test_topics_are_not_changed_while_no_controller_answers() -> None:
    world = AdminWorld()
    world.topic("t")

    async def catch_up() -> None:
        raise Unavailable("no controller answers")

    world.controller.catch_up = catch_up  # type: ignore[method-assign]
    assert delete(world, ("unknown", None)) == [("unknown", 7)]
    assert grow(world, 3, growable(3, "t", 2))["t"][0] == 7
