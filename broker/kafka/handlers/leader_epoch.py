"""OffsetForLeaderEpoch (23): the end of a leader epoch, by which a consumer detects a truncation (KIP-320)."""

from __future__ import annotations

from tidelog.broker.kafka.handlers.epochs import check_leader_epoch
from tidelog.broker.kafka.handlers.when_open import when_open
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.logs import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.steps import paced


async def handle(context: RequestContext, request: OffsetForLeaderEpochRequest) -> OffsetForLeaderEpochResponse:
    """Return the end offset of the largest epoch not newer than the requested one; -1, -1 if there is none."""
    topics = []
    for topic in request.topics:
        partitions = []
        async for wanted in paced(topic.partitions):
            error, epoch, end_offset = 0, -1, -1
            try:
                log = await when_open(context.services.partitions, topic.topic, wanted.partition)
                check_leader_epoch(log, wanted.current_leader_epoch)
                epoch, end_offset = log.end_offset_for_epoch(wanted.leader_epoch)
            except TidelogError as failure:
                error = failure.kafka_code
            partitions.append(
                EpochEndOffset(
                    error_code=error,
                    partition=wanted.partition,
                    leader_epoch=epoch,
                    end_offset=end_offset,
                )
            )
        topics.append(OffsetForLeaderTopicResult(topic=topic.topic, partitions=partitions))
    return OffsetForLeaderEpochResponse(topics=topics)


APIS = [serve(OffsetForLeaderEpochRequest, 2, 4, handle)]
