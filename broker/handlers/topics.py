"""CreateTopics, DeleteTopics and CreatePartitions.

Any broker answers them: commands go to the controller through its client, which returns when the local image has the
change. A client that creates a topic produces to it right after, so the answer waits (inside the request's time-out)
until the partitions that this broker leads are open.

Replication belongs to the replica set and not to the topic, so a topic's replication factor is 1 or -1 (DESIGN.md,
section 6); anything else is refused with that explanation rather than silently ignored.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from broker import topic_config
from broker.handlers.admin_errors import INVALID_REQUEST, Outcome, each, outcome
from broker.handlers.configs import topic_layers
from broker.services import ApiHandler, RequestContext, Services
from broker.wire import schema
from controller.errors import InvalidPartitions, InvalidReplicaAssignment, InvalidReplicationFactor, UnknownTopicId
from runtime.errors import InvalidInput, NotFound, TidelogError

if TYPE_CHECKING:
    from controller.model import TopicRecord

MIN_BUDGET_MS = 1_000
"""A time-out of 0 means "do not wait" in old clients; the command itself still gets this long."""
OPEN_WAIT_S = 10.0
"""Longest wait for new partitions to open; after it clients see LEADER_NOT_AVAILABLE and retry."""
POLL_S = 0.005
NAMED_TWICE: Outcome[Any] = Outcome(INVALID_REQUEST, "the topic is named twice in the request", None)


def _budget_s(request: Any) -> float:
    return max(schema.to_ms(request.timeout), MIN_BUDGET_MS) / 1000


async def create_topics(context: RequestContext, request: Any) -> Any:
    """CreateTopics v2–7: per-topic results; a topic named twice is refused once."""
    services = context.services
    s = schema.response(context.api_key, context.api_version)
    deadline = services.clock.monotonic() + _budget_s(request)
    counts = Counter(topic.name for topic in request.topics)

    async def create(topic: Any) -> Outcome[TopicRecord]:
        if counts[topic.name] > 1:
            return NAMED_TWICE
        budget_s = max(deadline - services.clock.monotonic(), 0.001)
        return await outcome(_create(services, topic, request.validate_only), budget_s)

    unique = {topic.name: topic for topic in request.topics}
    made = await each(unique.values(), create)
    if not request.validate_only:
        await wait_open(services, [one.value for one in made if one.value is not None], deadline)
    results = [
        _create_result(s, services, name, one, validate_only=request.validate_only)
        for name, one in zip(unique, made, strict=True)
    ]
    return s.make("CreateTopicsResponse", throttle_time=0, topics=results)


async def _create(services: Services, topic: Any, validate_only: bool) -> TopicRecord:
    configs = topic_config.validate({config.name: config.value for config in topic.configs})
    assignment = _assignment(services, topic)
    partitions = len(assignment) if assignment is not None else _partition_count(services, topic)
    return await services.controller.create_topic(
        topic.name,
        partitions,
        configs,
        internal=topic.name in topic_config.INTERNAL_TOPICS,
        validate_only=validate_only,
        assignment=assignment,
    )


def _partition_count(services: Services, topic: Any) -> int:
    if topic.replication_factor not in (-1, 1):
        raise _replication_refused(topic.replication_factor)
    if topic.num_partitions == -1:
        return services.kafka.num_partitions
    if topic.num_partitions < 1:
        raise InvalidPartitions(f"number of partitions {topic.num_partitions}: at least 1, or -1 for the default")
    return int(topic.num_partitions)


def _replication_refused(asked: int) -> InvalidReplicationFactor:
    return InvalidReplicationFactor(
        f"replication factor {asked}: a topic's data lies in the bucket and its newest seconds in the write-ahead log "
        "of a replica set, so replication is chosen there and not by topic",
        hint="ask for 1, or -1 for the default",
    )


def _assignment(services: Services, topic: Any) -> list[int] | None:
    """The broker of each partition from a manual assignment; None if there is none."""
    if not topic.assignments:
        return None
    if topic.num_partitions != -1 or topic.replication_factor != -1:
        raise InvalidInput("with a manual assignment, number of partitions and replication factor must be -1")
    by_index = {entry.partition_index: list(entry.broker_ids) for entry in topic.assignments}
    if len(by_index) != len(topic.assignments) or sorted(by_index) != list(range(len(by_index))):
        raise InvalidReplicaAssignment("assigned partitions must be 0, 1, 2, … without gaps or repetition")
    return [assigned_broker(services, index, by_index[index]) for index in range(len(by_index))]


def assigned_broker(services: Services, partition: int, brokers: Sequence[int]) -> int:
    """The one broker that a manual assignment names. Raises 38 and 39 as CreateTopics does."""
    if not brokers:
        raise InvalidReplicaAssignment(f"partition {partition} is assigned to no broker")
    if len(set(brokers)) != len(brokers):
        raise InvalidReplicaAssignment(f"partition {partition} is assigned to a broker twice")
    for broker in brokers:
        if broker not in services.controller.image.brokers:
            raise InvalidReplicaAssignment(f"partition {partition} is assigned to broker {broker}, which is not known")
    if len(brokers) > 1:
        raise _replication_refused(len(brokers))
    return brokers[0]


def _create_result(
    s: schema.Schema, services: Services, name: str, made: Outcome[TopicRecord], *, validate_only: bool = False
) -> Any:
    record = made.value
    if record is None:
        return s.make(
            "CreatableTopicResult",
            name=name,
            topic_id=None,
            error_code=made.code,
            error_message=made.message,
            num_partitions=-1,
            replication_factor=-1,
            configs=[],
        )
    return s.make(
        "CreatableTopicResult",
        name=name,
        topic_id=None if validate_only else uuid.UUID(bytes=record.id),
        error_code=0,
        error_message=None,
        num_partitions=record.partitions,
        replication_factor=1,
        configs=_created_configs(s, services, record) if s.has("CreatableTopicConfigs") else [],
    )


def _created_configs(s: schema.Schema, services: Services, record: TopicRecord) -> list[Any]:
    layers = topic_layers(services)
    configs = []
    for row in topic_config.TOPIC_CONFIGS.values():
        first = topic_config.resolve(row, record.configs, layers)[0]
        configs.append(
            s.make(
                "CreatableTopicConfigs",
                name=row.name,
                value=first.value,
                read_only=False,
                config_source=int(first.source),
                is_sensitive=False,
            )
        )
    return configs


async def wait_open(services: Services, topics: Sequence[TopicRecord], deadline: float) -> bool:
    """Wait until the partitions that this broker leads are open; False if `deadline` (monotonic) came first."""
    clock = services.clock
    image = services.controller.image
    deadline = min(deadline, clock.monotonic() + OPEN_WAIT_S)
    pause = POLL_S
    waiting = [(topic.id, partition.index) for topic in topics for partition in image.partitions(topic.id)]
    while True:
        waiting = [key for key in waiting if not _is_open(services, *key)]
        if not waiting:
            return True
        if clock.monotonic() + pause > deadline:
            return False
        await clock.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _is_open(services: Services, topic_id: bytes, index: int) -> bool:
    image = services.controller.image
    partition = image.partition(topic_id, index)
    if partition is None:
        return topic_id not in image.topics  # deleted meanwhile: nothing to wait for
    leader, _ = image.leader(partition)
    if leader != services.node_id:
        return leader >= 0  # another broker opens it; its clients retry there
    try:
        services.partitions.get_by_id(topic_id, index)
    except TidelogError:
        return False
    return True


async def delete_topics(context: RequestContext, request: Any) -> Any:
    """DeleteTopics v1–6: by name, from v6 also by id. Internal topics may be deleted, as in Kafka."""
    services = context.services
    s = schema.response(context.api_key, context.api_version)
    budget_s = _budget_s(request)
    wanted: list[tuple[str | None, uuid.UUID | None]] = (
        [(topic.name, topic.topic_id) for topic in request.topics]
        if hasattr(request, "topics")
        else [(name, None) for name in request.topic_names]
    )
    counts = Counter(wanted)

    async def delete(item: tuple[str | None, uuid.UUID | None]) -> Any:
        name, topic_id = item
        found = await outcome(_find_deletable(services, name, topic_id, counts[item]))
        done: Outcome[Any] = found
        if found.value is not None:
            done = await outcome(services.controller.delete_topic(found.value.id), budget_s)
            name, topic_id = found.value.name, uuid.UUID(bytes=found.value.id)
        return s.make(
            "DeletableTopicResult", name=name, topic_id=topic_id, error_code=done.code, error_message=done.message
        )

    results = await each(dict.fromkeys(wanted), delete)
    return s.make("DeleteTopicsResponse", throttle_time=0, responses=results)


async def _find_deletable(services: Services, name: str | None, topic_id: uuid.UUID | None, times: int) -> TopicRecord:
    if name is not None and topic_id is not None:
        raise InvalidInput("a topic may be given by name or by id, not by both")
    if name is None and topic_id is None:
        raise InvalidInput("neither topic name nor topic id is given")
    if times > 1:
        raise InvalidInput("the topic is named twice in the request")
    image = services.controller.image
    if topic_id is not None:
        record = image.topics.get(topic_id.bytes)
        if record is None:
            raise UnknownTopicId(f"no topic has the id {topic_id}")
        return record
    return topic_by_name(services, name or "")


def topic_by_name(services: Services, name: str) -> TopicRecord:
    """The topic of that name. Raises `NotFound` (3)."""
    record = services.controller.image.topic(name)
    if record is None:
        raise NotFound(f"topic {name!r} does not exist")
    return record


async def create_partitions(context: RequestContext, request: Any) -> Any:
    """CreatePartitions v0–3: `count` is the new total."""
    services = context.services
    s = schema.response(context.api_key, context.api_version)
    deadline = services.clock.monotonic() + _budget_s(request)
    counts = Counter(topic.name for topic in request.topics)

    async def grow(topic: Any) -> Outcome[TopicRecord]:
        if counts[topic.name] > 1:
            return NAMED_TWICE
        budget_s = max(deadline - services.clock.monotonic(), 0.001)
        return await outcome(_grow(services, topic, request.validate_only), budget_s)

    unique = {topic.name: topic for topic in request.topics}
    grown = await each(unique.values(), grow)
    if not request.validate_only:
        await wait_open(services, [one.value for one in grown if one.value is not None], deadline)
    results = [
        s.make("CreatePartitionsTopicResult", name=name, error_code=one.code, error_message=one.message)
        for name, one in zip(unique, grown, strict=True)
    ]
    return s.make("CreatePartitionsResponse", throttle_time=0, results=results)


async def _grow(services: Services, topic: Any, validate_only: bool) -> TopicRecord:
    record = topic_by_name(services, topic.name)
    if topic.count <= record.partitions:
        raise InvalidPartitions(
            f"topic {record.name} has {record.partitions} partitions; {topic.count} asked for, and it can only grow"
        )
    assignment = _new_assignment(services, record, topic)
    return await services.controller.create_partitions(
        record.id, topic.count, assignment=assignment, validate_only=validate_only
    )


def _new_assignment(services: Services, record: TopicRecord, topic: Any) -> list[int] | None:
    """The broker of each new partition from a manual assignment; None if there is none."""
    if topic.assignments is None:
        return None
    added = topic.count - record.partitions
    if len(topic.assignments) != added:
        raise InvalidReplicaAssignment(f"{added} new partitions, but {len(topic.assignments)} assignments")
    return [
        assigned_broker(services, index, list(one.broker_ids))
        for index, one in enumerate(topic.assignments, start=record.partitions)
    ]


APIS = [
    ApiHandler(19, 2, 7, create_topics),
    ApiHandler(20, 1, 6, delete_topics),
    ApiHandler(37, 0, 3, create_partitions),
]
