"""CreateTopics, DeleteTopics and CreatePartitions.

Any broker serves them: commands go to the controller through its client, which returns when the local image has the
change. A client that creates a topic produces to it right after, so the response waits (within the request's time-out)
until the partitions that this broker leads are open.

Replication is a property of the replica set, not of the topic (docs/protocols.md, Replica sets). A topic with a
replication factor is placed on the smallest sets that have, or get, as many replicas; -1: on any. What no set can give
is refused with that explanation instead of being ignored silently.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.broker.kafka.handlers.admin_errors import INVALID_REQUEST, ItemOutcome, each, outcome
from tidelog.broker.kafka.handlers.configs import topic_layers
from tidelog.broker.kafka.replicas import default_replicas, named_replica_set
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.messages.topics import (
    CreatableTopic,
    CreatableTopicResult,
    CreatedTopicConfig,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from tidelog.broker.partitions import topic_config
from tidelog.controller.model.errors import (
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    UnknownTopicId,
)
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError

if TYPE_CHECKING:
    from tidelog.controller.model.records import TopicRecord

logger = logging.getLogger(__name__)

_FIRST_WITH_CONFIGS = 5
"""Version of CreateTopics."""
_FIRST_WITH_TOPIC_ID = 6
"""Version of DeleteTopics."""
MIN_BUDGET_MS = 1_000
"""In old clients a time-out of 0 means "do not wait"; the command itself still gets this long."""
OPEN_WAIT_S = 10.0
"""Longest wait for new partitions to open; after that clients get LEADER_NOT_AVAILABLE and retry."""
POLL_S = 0.005
NAMED_TWICE: ItemOutcome[TopicRecord] = ItemOutcome(INVALID_REQUEST, "the topic is named twice in the request", None)


def _budget_s(timeout_ms: int) -> float:
    return max(timeout_ms, MIN_BUDGET_MS) / 1000


async def create_topics(context: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    """CreateTopics v2–7: per-topic results; a topic named twice is refused once."""
    services = context.services
    deadline = services.clock.monotonic() + _budget_s(request.timeout_ms)
    counts = Counter(topic.name for topic in request.topics)

    async def create(topic: CreatableTopic) -> ItemOutcome[TopicRecord]:
        if counts[topic.name] > 1:
            return NAMED_TWICE
        budget_s = max(deadline - services.clock.monotonic(), 0.001)
        return await outcome(_create(services, topic, request.validate_only), budget_s)

    unique = {topic.name: topic for topic in request.topics}
    made = await each(unique.values(), create)
    if not request.validate_only:
        await wait_open(services, [one.value for one in made if one.value is not None], deadline)
    results = [
        _create_result(context, topic, one, validate_only=request.validate_only)
        for topic, one in zip(unique.values(), made, strict=True)
    ]
    return CreateTopicsResponse(topics=results)


async def _create(services: Services, topic: CreatableTopic, validate_only: bool) -> TopicRecord:
    configs = topic_config.validate({config.name: config.value for config in topic.configs})
    assignment = _assignment(services, topic)
    replicas = _replicas(topic) if assignment is None else min(len(entry.broker_ids) for entry in topic.assignments)
    partitions = len(assignment) if assignment is not None else _partition_count(services, topic)
    told = topic_config.warning(configs)
    if told is not None and not validate_only:
        logger.warning("a topic's settings have no effect", extra={"topic": topic.name, "settings": told})
    return await services.controller.create_topic(
        topic.name,
        partitions,
        configs,
        internal=topic.name in topic_config.INTERNAL_TOPICS,
        validate_only=validate_only,
        assignment=assignment,
        replicas=replicas,
    )


def _replicas(topic: CreatableTopic) -> int:
    """Return the replicas that a topic asks for; 0: any number. The controllers know what the sets can give."""
    asked = topic.replication_factor
    if asked < 1 and asked != -1:
        raise InvalidReplicationFactor(f"replication factor {asked}: at least 1, or -1 for the default")
    return max(0, asked)


def _partition_count(services: Services, topic: CreatableTopic) -> int:
    if topic.num_partitions == -1:
        return services.kafka.num_partitions
    if topic.num_partitions < 1:
        raise InvalidPartitions(f"number of partitions {topic.num_partitions}: at least 1, or -1 for the default")
    return topic.num_partitions


def _assignment(services: Services, topic: CreatableTopic) -> list[int] | None:
    """Return the replica set of each partition from a manual assignment; None if there is none."""
    if not topic.assignments:
        return None
    if topic.num_partitions != -1 or topic.replication_factor != -1:
        raise InvalidInput("with a manual assignment, number of partitions and replication factor must be -1")
    by_index = {entry.partition_index: list(entry.broker_ids) for entry in topic.assignments}
    if len(by_index) != len(topic.assignments) or sorted(by_index) != list(range(len(by_index))):
        raise InvalidReplicaAssignment("assigned partitions must be 0, 1, 2, … without gaps or repetition")
    image = services.controller.image
    return [named_replica_set(image, by_index[index], f"partition {index}") for index in range(len(by_index))]


def _create_result(
    context: RequestContext, topic: CreatableTopic, made: ItemOutcome[TopicRecord], *, validate_only: bool
) -> CreatableTopicResult:
    record = made.value
    if record is None:
        return CreatableTopicResult(name=topic.name, error_code=made.code, error_message=made.message)
    return CreatableTopicResult(
        name=topic.name,
        topic_id=None if validate_only else uuid.UUID(bytes=record.id),
        error_code=0,
        error_message=topic_config.warning(record.configs),
        num_partitions=record.partitions,
        replication_factor=_given_replicas(context.services, record, topic.replication_factor),
        configs=_created_configs(context.services, record) if context.api_version >= _FIRST_WITH_CONFIGS else (),
    )


def _given_replicas(services: Services, record: TopicRecord, asked: int) -> int:
    """Return the replicas that every partition of a topic has, or gets; at least, of one that was only validated."""
    image = services.controller.image
    given = (image.replica_count(partition.replica_set) for partition in image.partitions(record.id))
    return min(given, default=max(asked, default_replicas(image)))


def _created_configs(services: Services, record: TopicRecord) -> list[CreatedTopicConfig]:
    layers = topic_layers(services)
    configs = []
    for row in topic_config.TOPIC_CONFIGS.values():
        first = topic_config.resolve(row, record.configs, layers)[0]
        configs.append(
            CreatedTopicConfig(
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
        return topic_id not in image.topics  # deleted meanwhile: no need to wait
    leader, _ = image.leader(partition)
    if leader != services.node_id:
        return leader >= 0  # another broker opens it; its clients retry at that broker
    try:
        services.partitions.get_by_id(topic_id, index)
    except TidelogError:
        return False
    return True


async def delete_topics(context: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    """DeleteTopics v1–6: by name, from v6 also by id. Internal topics may be deleted, as in Kafka."""
    services = context.services
    budget_s = _budget_s(request.timeout_ms)
    wanted: list[tuple[str | None, uuid.UUID | None]] = (
        [(topic.name, topic.topic_id) for topic in request.topics]
        if context.api_version >= _FIRST_WITH_TOPIC_ID
        else [(name, None) for name in request.topic_names]
    )
    counts = Counter(wanted)
    caught_up = await outcome(services.controller.catch_up(), budget_s)

    async def delete(item: tuple[str | None, uuid.UUID | None]) -> DeletableTopicResult:
        name, topic_id = item
        if caught_up.code:
            return DeletableTopicResult(
                name=name, topic_id=topic_id, error_code=caught_up.code, error_message=caught_up.message
            )
        found = await outcome(_find_deletable(services, name, topic_id, counts[item]))
        done: ItemOutcome[TopicRecord] | ItemOutcome[None] = found
        if found.value is not None:
            done = await outcome(services.controller.delete_topic(found.value.id), budget_s)
            name, topic_id = found.value.name, uuid.UUID(bytes=found.value.id)
        return DeletableTopicResult(name=name, topic_id=topic_id, error_code=done.code, error_message=done.message)

    results = await each(dict.fromkeys(wanted), delete)
    return DeleteTopicsResponse(responses=results)


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
    """Return the topic of that name. Raises `NotFound` (3)."""
    record = services.controller.image.topic(name)
    if record is None:
        raise NotFound(f"topic {name!r} does not exist")
    return record


async def create_partitions(context: RequestContext, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
    """CreatePartitions v0–3: `count` is the new total."""
    services = context.services
    deadline = services.clock.monotonic() + _budget_s(request.timeout_ms)
    counts = Counter(topic.name for topic in request.topics)
    caught_up = await outcome(services.controller.catch_up(), _budget_s(request.timeout_ms))

    async def grow(topic: CreatePartitionsTopic) -> ItemOutcome[TopicRecord]:
        if counts[topic.name] > 1:
            return NAMED_TWICE
        if caught_up.code:
            return ItemOutcome(caught_up.code, caught_up.message, None)
        budget_s = max(deadline - services.clock.monotonic(), 0.001)
        return await outcome(_grow(services, topic, request.validate_only), budget_s)

    unique = {topic.name: topic for topic in request.topics}
    grown = await each(unique.values(), grow)
    if not request.validate_only:
        await wait_open(services, [one.value for one in grown if one.value is not None], deadline)
    results = [
        CreatePartitionsTopicResult(name=name, error_code=one.code, error_message=one.message)
        for name, one in zip(unique, grown, strict=True)
    ]
    return CreatePartitionsResponse(results=results)


async def _grow(services: Services, topic: CreatePartitionsTopic, validate_only: bool) -> TopicRecord:
    record = topic_by_name(services, topic.name)
    if topic.count <= record.partitions:
        raise InvalidPartitions(
            f"topic {record.name} has {record.partitions} partitions; {topic.count} requested, but it can only grow"
        )
    if record.name in topic_config.INTERNAL_TOPICS:
        raise InvalidPartitions(
            f"the internal topic {record.name} keeps its {record.partitions} partitions: with more of them groups and "
            "transactional ids would be looked for in others, without their offsets and transactions"
        )
    assignment = _new_assignment(services, record, topic)
    return await services.controller.create_partitions(
        record.id, topic.count, assignment=assignment, validate_only=validate_only
    )


def _new_assignment(services: Services, record: TopicRecord, topic: CreatePartitionsTopic) -> list[int] | None:
    """Return the replica set of each new partition from a manual assignment; None if there is none."""
    if topic.assignments is None:
        return None
    added = topic.count - record.partitions
    if len(topic.assignments) != added:
        raise InvalidReplicaAssignment(f"{added} new partitions, but {len(topic.assignments)} assignments")
    image = services.controller.image
    return [
        named_replica_set(image, one.broker_ids, f"partition {index}")
        for index, one in enumerate(topic.assignments, start=record.partitions)
    ]


APIS = [
    serve(CreateTopicsRequest, 2, 7, create_topics),
    serve(DeleteTopicsRequest, 1, 6, delete_topics),
    serve(CreatePartitionsRequest, 0, 3, create_partitions),
]
