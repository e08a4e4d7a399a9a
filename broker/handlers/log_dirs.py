"""DescribeLogDirs: one log directory, with the partitions that this broker leads.

A partition's size is what its log holds, wherever the bytes lie now. Totals are -1: a bucket has no size to report.
"""

from __future__ import annotations

from typing import Any

from broker.broker_config import log_dir
from broker.services import ApiHandler, RequestContext
from broker.wire import schema

UNKNOWN_BYTES = -1


async def describe_log_dirs(context: RequestContext, request: Any) -> Any:
    """DescribeLogDirs v1–4. Partitions that are not led here are left out, as in Kafka."""
    services = context.services
    s = schema.response(context.api_key, context.api_version)
    wanted = None if request.topics is None else {topic.topic: set(topic.partitions) for topic in request.topics}
    by_topic: dict[str, list[Any]] = {}
    for log in sorted(services.partitions.all(), key=lambda log: (log.topic, log.partition)):
        if wanted is not None and log.partition not in wanted.get(log.topic, ()):
            continue
        partition = s.make(
            "DescribeLogDirsPartition",
            partition_index=log.partition,
            partition_size=log.size_bytes(),
            offset_lag=0,
            is_future_key=False,
        )
        by_topic.setdefault(log.topic, []).append(partition)
    directory = s.make(
        "DescribeLogDirsResult",
        error_code=0,
        log_dir=log_dir(services.broker_configs()),
        topics=[s.make("DescribeLogDirsTopic", name=name, partitions=parts) for name, parts in by_topic.items()],
        total_bytes=UNKNOWN_BYTES,
        usable_bytes=UNKNOWN_BYTES,
    )
    return s.make("DescribeLogDirsResponse", throttle_time=0, error_code=0, results=[directory])


APIS = [ApiHandler(35, 1, 4, describe_log_dirs)]
