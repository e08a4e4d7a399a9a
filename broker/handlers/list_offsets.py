"""ListOffsets (2): the offset for a timestamp, or one of the special ones.

-1 latest (the last stable offset under read_committed), -2 earliest, -3 the record with the largest timestamp (v7+,
KIP-734), -4 earliest local (v8+; all of the log is served from here, so it is the log start), -5 latest tiered (v9+;
"none", since the bucket is no second tier but the log itself). Anything else is the first record at or after a time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from broker.errors import INVALID_REQUEST, UNSUPPORTED_VERSION, fetch_code
from broker.handlers.epochs import NO_EPOCH, check_leader_epoch
from broker.services import ApiHandler, RequestContext
from broker.wire import schema
from runtime.errors import CorruptData, InvalidInput, TidelogError

if TYPE_CHECKING:
    from stream.partition_log import PartitionLog

API_KEY = 2
LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
_FIRST_VERSION = {LATEST: 1, EARLIEST: 1, MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9}
_READ_COMMITTED = 1
MAX_LOOKUPS = 32
"""Partitions looked up side by side for one request: timestamps may have to be read from the bucket."""


class _Found(NamedTuple):
    offset: int = -1
    timestamp: int = -1
    leader_epoch: int = -1


class _Duplicate(InvalidInput):
    """A partition is asked for twice. Kafka: INVALID_REQUEST (42)."""

    kafka_code = INVALID_REQUEST


class _UnknownSpecial(InvalidInput):
    """A special timestamp of a later version. Kafka: UNSUPPORTED_VERSION (35)."""

    kafka_code = UNSUPPORTED_VERSION


async def _find(log: PartitionLog, timestamp: int, version: int, committed: bool) -> _Found:
    if timestamp < 0 and version < _FIRST_VERSION.get(timestamp, version + 1):
        raise _UnknownSpecial(f"ListOffsets v{version} has no special timestamp {timestamp}")
    if timestamp == LATEST:
        return _Found(log.last_stable_offset if committed else log.high_watermark, -1, log.leader_epoch)
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        start = log.log_start_offset
        return _Found(start, -1, log.epoch_at(start))
    if timestamp == LATEST_TIERED:
        return _Found()
    if timestamp == MAX_TIMESTAMP:
        found = await log.offset_of_max_timestamp()
    else:
        found = await log.offset_for_timestamp(timestamp, committed=committed)
    return _Found() if found is None else _Found(*found)


async def handle(context: RequestContext, request: Any) -> Any:
    """Look all partitions up, side by side."""
    make = schema.response(API_KEY, context.api_version).make
    committed = getattr(request, "isolation_level", 0) == _READ_COMMITTED
    gate = asyncio.Semaphore(MAX_LOOKUPS)
    seen: set[tuple[str, int]] = set()
    repeated: set[tuple[str, int]] = set()
    for topic in request.topics:
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            (repeated if key in seen else seen).add(key)

    async def answer(name: str, wanted: Any) -> Any:
        index = wanted.partition_index
        error, found = 0, _Found()
        try:
            if (name, index) in repeated:
                raise _Duplicate(f"{name}-{index} is asked for twice")
            log = context.services.partitions.get(name, index)
            check_leader_epoch(log, getattr(wanted, "current_leader_epoch", NO_EPOCH))
            async with gate:
                found = await _find(log, wanted.timestamp, context.api_version, committed)
        except TidelogError as failure:
            error = fetch_code(failure) if isinstance(failure, CorruptData) else failure.kafka_code
        return make(
            "ListOffsetsPartitionResponse",
            partition_index=index,
            error_code=error,
            timestamp=found.timestamp,
            offset=found.offset,
            leader_epoch=found.leader_epoch,
        )

    topics = []
    for topic in request.topics:
        partitions = await asyncio.gather(*(answer(topic.name, partition) for partition in topic.partitions))
        topics.append(make("ListOffsetsTopicResponse", name=topic.name, partitions=partitions))
    return make("ListOffsetsResponse", throttle_time=0, topics=topics)


APIS = [ApiHandler(API_KEY, 1, 10, handle)]
