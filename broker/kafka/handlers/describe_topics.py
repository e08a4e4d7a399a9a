"""DescribeTopicPartitions (KIP-966): topics in pages of partitions, ordered by name."""

from __future__ import annotations

import uuid

from tidelog.broker.kafka.errors import INVALID_TOPIC_EXCEPTION
from tidelog.broker.kafka.handlers.metadata import is_legal_name
from tidelog.broker.kafka.replicas import replicas_of
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.topics import (
    DescribeTopicPartitionsCursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import PartitionRecord, TopicRecord
from tidelog.runtime.steps import paced

MAX_PARTITIONS = 2_000
"""Limit of partitions in one response (Kafka: max.request.partition.size.limit)."""
TOPIC_OPERATIONS = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 10, 11))
"""Read, write, create, delete, alter, describe, describe and alter configs: all, without an authorizer."""
LEADER_NOT_AVAILABLE = 5
UNKNOWN_TOPIC = 3
INVALID_REQUEST = 42


async def describe_topic_partitions(
    context: RequestContext, request: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    """DescribeTopicPartitions v0: no topics means all; the cursor is the end of the previous page."""
    image = context.services.controller.image
    cursor = request.cursor
    asked = sorted({topic.name for topic in request.topics})
    if cursor is not None and cursor.partition_index < 0:
        refused = [_topic(name, None, INVALID_REQUEST, []) for name in asked]
        return DescribeTopicPartitionsResponse(topics=refused, next_cursor=None)
    names = asked or sorted(image.topic_ids)
    if cursor is not None:
        names = [name for name in names if name >= cursor.topic_name]
    left = max(1, min(request.response_partition_limit, MAX_PARTITIONS))
    topics, next_cursor = [], None
    async for name in paced(names):
        record = image.topic(name)
        if record is None:
            code = UNKNOWN_TOPIC if is_legal_name(name) else INVALID_TOPIC_EXCEPTION
            topics.append(_topic(name, None, code, []))
            continue
        first = cursor.partition_index if cursor is not None and cursor.topic_name == name else 0
        partitions = [one for one in image.partitions(record.id) if one.index >= first]
        if left == 0 and partitions:
            next_cursor = DescribeTopicPartitionsCursor(topic_name=name, partition_index=partitions[0].index)
            break
        page = partitions[:left]
        left -= len(page)
        topics.append(_topic(name, record, 0, [_partition(image, one) for one in page]))
        if len(page) < len(partitions):
            next_cursor = DescribeTopicPartitionsCursor(topic_name=name, partition_index=partitions[len(page)].index)
            break
    return DescribeTopicPartitionsResponse(topics=topics, next_cursor=next_cursor)


def _topic(
    name: str, record: TopicRecord | None, code: int, partitions: list[DescribeTopicPartitionsResponsePartition]
) -> DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponseTopic(
        error_code=code,
        name=name,
        topic_id=None if record is None else uuid.UUID(bytes=record.id),
        is_internal=record is not None and record.internal,
        partitions=partitions,
        topic_authorized_operations=TOPIC_OPERATIONS if record is not None else -(1 << 31),
    )


def _partition(image: Image, partition: PartitionRecord) -> DescribeTopicPartitionsResponsePartition:
    leader, epoch = image.announced_leader(partition)
    replicas = replicas_of(image, partition)
    return DescribeTopicPartitionsResponsePartition(
        error_code=0 if leader >= 0 else LEADER_NOT_AVAILABLE,
        partition_index=partition.index,
        leader_id=leader,
        leader_epoch=epoch,
        replica_nodes=replicas.nodes,
        isr_nodes=replicas.in_sync,
        eligible_leader_replicas=[],
        last_known_elr=[],
        offline_replicas=replicas.offline,
    )


APIS = [serve(DescribeTopicPartitionsRequest, 0, 0, describe_topic_partitions)]
