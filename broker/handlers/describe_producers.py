"""DescribeProducers: the idempotent and transactional producers that a partition remembers (KIP-664)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.handlers.admin_errors import each, outcome
from broker.services import ApiHandler, RequestContext, Services
from broker.wire import schema

if TYPE_CHECKING:
    from stream.partition_log import PartitionLog


async def describe_producers(context: RequestContext, request: Any) -> Any:
    """DescribeProducers v0: partitions that are not led here are answered with their error."""
    s = schema.response(context.api_key, context.api_version)

    async def topic_result(topic: Any) -> Any:
        async def describe(index: int) -> Any:
            found = await outcome(_log(context.services, topic.name, index))
            producers = found.value.producers() if found.value is not None else ()
            return s.make(
                "PartitionResponse",
                partition_index=index,
                error_code=found.code,
                error_message=found.message,
                active_producers=[
                    s.make(
                        "ProducerState",
                        producer_id=producer.producer_id,
                        producer_epoch=producer.producer_epoch,
                        last_sequence=producer.last_sequence,
                        last_timestamp=producer.last_timestamp,
                        coordinator_epoch=producer.coordinator_epoch,
                        current_txn_start_offset=producer.current_txn_start_offset,
                    )
                    for producer in producers
                ],
            )

        return s.make("TopicResponse", name=topic.name, partitions=await each(topic.partition_indexes, describe))

    return s.make("DescribeProducersResponse", throttle_time=0, topics=await each(request.topics, topic_result))


async def _log(services: Services, topic: str, index: int) -> PartitionLog:
    return services.partitions.get(topic, index)


APIS = [ApiHandler(61, 0, 0, describe_producers)]
