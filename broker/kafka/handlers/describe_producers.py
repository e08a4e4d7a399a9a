"""DescribeProducers: the idempotent and transactional producers known to a partition (KIP-664)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.broker.kafka.handlers.admin_errors import each, outcome
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.messages.logs import (
    ActiveProducer,
    DescribeProducersPartitionResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeProducersTopicResponse,
)

if TYPE_CHECKING:
    from tidelog.stream.partition_log import PartitionLog


async def describe_producers(context: RequestContext, request: DescribeProducersRequest) -> DescribeProducersResponse:
    """DescribeProducers v0: for partitions not led here the response has their error.

    A partition that is named several times is described once: it may have many producers.
    """
    wanted: dict[str, dict[int, None]] = {}
    for topic in request.topics:
        wanted.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))

    async def topic_result(name: str) -> DescribeProducersTopicResponse:
        async def describe(index: int) -> DescribeProducersPartitionResponse:
            found = await outcome(_log(context.services, name, index))
            producers = found.value.producers() if found.value is not None else ()
            return DescribeProducersPartitionResponse(
                partition_index=index,
                error_code=found.code,
                error_message=found.message,
                active_producers=[
                    ActiveProducer(
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

        return DescribeProducersTopicResponse(name=name, partitions=await each(wanted[name], describe))

    return DescribeProducersResponse(topics=await each(wanted, topic_result))


async def _log(services: Services, topic: str, index: int) -> PartitionLog:
    return services.partitions.get(topic, index)


APIS = [serve(DescribeProducersRequest, 0, 0, describe_producers)]
