"""DeleteRecords: move a partition's log start forward. -1 means the high watermark.

As in Kafka, records of internal topics, and of topics whose cleanup policy has no `delete`, are not deleted this way.
"""

from __future__ import annotations

from typing import Any

from broker.handlers.admin_errors import PolicyViolation, each, outcome
from broker.services import ApiHandler, RequestContext, Services
from broker.wire import schema
from controller.errors import InvalidTopic

MIN_BUDGET_MS = 1_000
NO_WATERMARK = -1


async def delete_records(context: RequestContext, request: Any) -> Any:
    """DeleteRecords v0–2: returns each partition's new log start as its low watermark."""
    s = schema.response(context.api_key, context.api_version)
    budget_s = max(schema.to_ms(request.timeout), MIN_BUDGET_MS) / 1000

    async def topic_result(topic: Any) -> Any:
        async def delete(partition: Any) -> Any:
            work = _delete(context.services, topic.name, partition.partition_index, partition.offset)
            done = await outcome(work, budget_s)
            return s.make(
                "DeleteRecordsPartitionResult",
                partition_index=partition.partition_index,
                low_watermark=NO_WATERMARK if done.value is None else done.value,
                error_code=done.code,
            )

        return s.make("DeleteRecordsTopicResult", name=topic.name, partitions=await each(topic.partitions, delete))

    return s.make("DeleteRecordsResponse", throttle_time=0, topics=await each(request.topics, topic_result))


async def _delete(services: Services, topic: str, partition: int, offset: int) -> int:
    log = services.partitions.get(topic, partition)
    record = services.controller.image.topic(topic)
    if record is not None and record.internal:
        raise InvalidTopic(f"records of the internal topic {topic} cannot be deleted")
    if not log.config.deletes:
        raise PolicyViolation(
            f"records of {topic} cannot be deleted: its cleanup.policy is {log.config.cleanup_policy}"
        )
    return await log.delete_records(offset)


APIS = [ApiHandler(21, 0, 2, delete_records)]
