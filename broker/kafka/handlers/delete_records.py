"""DeleteRecords: move a partition's log start forward. -1 means the high watermark.

As in Kafka, records of internal topics, and of topics whose cleanup policy is `compact` alone, are not deleted this
way.
"""

from __future__ import annotations

from tidelog.broker.kafka.handlers.admin_errors import PolicyViolation, each, outcome
from tidelog.broker.kafka.handlers.when_open import when_open
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.messages.logs import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
    DeleteRecordsTopicResult,
)
from tidelog.controller.model.errors import InvalidTopic

MIN_BUDGET_MS = 1_000
NO_WATERMARK = -1


async def delete_records(context: RequestContext, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    """DeleteRecords v0–2: return each partition's new log start as its low watermark."""
    budget_s = max(request.timeout_ms, MIN_BUDGET_MS) / 1000

    async def topic_result(topic: DeleteRecordsTopic) -> DeleteRecordsTopicResult:
        async def delete(partition: DeleteRecordsPartition) -> DeleteRecordsPartitionResult:
            work = _delete(context.services, topic.name, partition.partition_index, partition.offset)
            done = await outcome(work, budget_s)
            return DeleteRecordsPartitionResult(
                partition_index=partition.partition_index,
                low_watermark=NO_WATERMARK if done.value is None else done.value,
                error_code=done.code,
            )

        return DeleteRecordsTopicResult(name=topic.name, partitions=await each(topic.partitions, delete))

    return DeleteRecordsResponse(topics=await each(request.topics, topic_result))


async def _delete(services: Services, topic: str, partition: int, offset: int) -> int:
    log = await when_open(services.partitions, topic, partition)
    record = services.controller.image.topic(topic)
    if record is not None and record.internal:
        raise InvalidTopic(f"records of the internal topic {topic} cannot be deleted")
    if log.config.compacts and not log.config.deletes:
        raise PolicyViolation(
            f"records of {topic} cannot be deleted: its cleanup.policy is {log.config.cleanup_policy}"
        )
    await log.wait_inherited()  # else the end that the leader before this one has told would be out of range
    return await log.delete_records(offset)


APIS = [serve(DeleteRecordsRequest, 0, 2, delete_records)]
