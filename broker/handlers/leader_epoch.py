"""OffsetForLeaderEpoch (23): where a leader epoch ends, so that a consumer finds out what was truncated (KIP-320)."""

from __future__ import annotations

from typing import Any

from broker.handlers.epochs import NO_EPOCH, check_leader_epoch
from broker.services import ApiHandler, RequestContext
from broker.wire import schema
from runtime.errors import TidelogError

API_KEY = 23


async def handle(context: RequestContext, request: Any) -> Any:
    """The end offset of the largest epoch that is not newer than the one asked for; -1, -1 if there is none."""
    make = schema.response(API_KEY, context.api_version).make
    topics = []
    for topic in request.topics:
        partitions = []
        for wanted in topic.partitions:
            error, epoch, end_offset = 0, -1, -1
            try:
                log = context.services.partitions.get(topic.topic, wanted.partition)
                check_leader_epoch(log, getattr(wanted, "current_leader_epoch", NO_EPOCH))
                epoch, end_offset = log.end_offset_for_epoch(wanted.leader_epoch)
            except TidelogError as failure:
                error = failure.kafka_code
            partitions.append(
                make(
                    "EpochEndOffset",
                    error_code=error,
                    partition=wanted.partition,
                    leader_epoch=epoch,
                    end_offset=end_offset,
                )
            )
        topics.append(make("OffsetForLeaderTopicResult", topic=topic.topic, partitions=partitions))
    return make("OffsetForLeaderEpochResponse", throttle_time=0, topics=topics)


APIS = [ApiHandler(API_KEY, 2, 4, handle)]
