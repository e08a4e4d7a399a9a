"""DescribeLogDirs: one log directory, with the partitions that this broker leads.

A partition's size is that of its log, wherever the bytes are stored. Totals are -1: a bucket has no size to report.
"""

from __future__ import annotations

from tidelog.broker.kafka.broker_config import log_dir
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.logs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)

UNKNOWN_BYTES = -1


async def describe_log_dirs(context: RequestContext, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    """DescribeLogDirs v1–4. Partitions that are not led here are left out, as in Kafka."""
    services = context.services
    wanted = None if request.topics is None else {topic.topic: set(topic.partitions) for topic in request.topics}
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


APIS = [serve(DescribeLogDirsRequest, 1, 4, describe_log_dirs)]
