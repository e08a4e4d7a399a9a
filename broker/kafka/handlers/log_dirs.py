"""DescribeLogDirs and AlterReplicaLogDirs: one log directory, with the partitions that this broker leads.

A partition's size is that of its log, wherever the bytes are stored. Totals are -1: a bucket has no size to report.
"""

from __future__ import annotations

from tidelog.broker.kafka.broker_config import log_dir
from tidelog.broker.kafka.errors import LOG_DIR_NOT_FOUND, NONE, UNKNOWN_TOPIC_OR_PARTITION
from tidelog.broker.kafka.handlers.named_topics import partitions_by_topic
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.logs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)

UNKNOWN_BYTES = -1


async def describe_log_dirs(context: RequestContext, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    """DescribeLogDirs v1–4. Only the leader tells of a partition: its log is in the bucket once, and tools add up."""
    services = context.services
    wanted = None if request.topics is None else partitions_by_topic(request.topics)
    by_topic: dict[str, list[DescribeLogDirsPartition]] = {}
    for log in sorted(services.partitions.all(), key=lambda log: (log.topic, log.partition)):
        if wanted is not None and log.partition not in wanted.get(log.topic, ()):
            continue
        partition = DescribeLogDirsPartition(
            partition_index=log.partition,
            partition_size=log.size_bytes(),
            offset_lag=0,
            is_future_key=False,
        )
        by_topic.setdefault(log.topic, []).append(partition)
    directory = DescribeLogDirsResult(
        error_code=0,
        log_dir=log_dir(services.broker_configs()),
        topics=[DescribeLogDirsTopic(name=name, partitions=parts) for name, parts in by_topic.items()],
        total_bytes=UNKNOWN_BYTES,
        usable_bytes=UNKNOWN_BYTES,
    )
    return DescribeLogDirsResponse(error_code=0, results=[directory])


async def alter_replica_log_dirs(
    context: RequestContext, request: AlterReplicaLogDirsRequest
) -> AlterReplicaLogDirsResponse:
    """AlterReplicaLogDirs v1–2: a partition is where its broker's one directory is, and cannot be in another."""
    services = context.services
    here = log_dir(services.broker_configs())

    def code(path: str, topic: str, partition: int) -> int:
        record = services.controller.image.topic(topic)
        if record is None or not 0 <= partition < record.partitions:
            return UNKNOWN_TOPIC_OR_PARTITION
        return NONE if path == here else LOG_DIR_NOT_FOUND

    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirTopicResult(
                topic_name=topic.name,
                partitions=[
                    AlterReplicaLogDirPartitionResult(
                        partition_index=each, error_code=code(directory.path, topic.name, each)
                    )
                    for each in topic.partitions
                ],
            )
            for directory in request.dirs
            for topic in directory.topics
        ]
    )


APIS = [
    serve(AlterReplicaLogDirsRequest, 1, 2, alter_replica_log_dirs),
    serve(DescribeLogDirsRequest, 1, 4, describe_log_dirs),
]
