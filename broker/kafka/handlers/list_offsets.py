"""ListOffsets (2): the offset for a timestamp, or for a special timestamp.

-1 latest (the last stable offset under read_committed), -2 earliest, -3 the record with the largest timestamp (v7+,
KIP-734), -4 earliest local (v8+; the whole log is served from here, so it is the log start), -5 latest tiered (v9+;
"none", since the bucket is no second tier but the log itself), -6 the first offset that is still to be tiered (v11+,
KIP-1023; "none" as well). Any other value: the first record at or after that time.

A leader that has just been elected may know less of what is confirmed than the one before it has told. The end, and
records that may be beyond it, are not told before it has confirmed what it inherited (KIP-207): the request waits a
little, and is then answered with OFFSET_NOT_AVAILABLE, before v5 LEADER_NOT_AVAILABLE.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, NamedTuple

from tidelog.broker.kafka.errors import INVALID_REQUEST, LEADER_NOT_AVAILABLE, UNSUPPORTED_VERSION, fetch_code
from tidelog.broker.kafka.handlers.admin_errors import each
from tidelog.broker.kafka.handlers.epochs import check_leader_epoch
from tidelog.broker.kafka.handlers.when_open import when_open
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.logs import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from tidelog.runtime.errors import CorruptData, InvalidInput, TidelogError
from tidelog.stream.errors import OffsetNotAvailable

if TYPE_CHECKING:
    from tidelog.stream.partition_log import PartitionLog

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
EARLIEST_PENDING_UPLOAD = -6
_TIERED = (LATEST_TIERED, EARLIEST_PENDING_UPLOAD)
_FIRST_VERSION = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
_FIRST_WITH_NOT_AVAILABLE = 5
_READ_COMMITTED = 1
_PARTITIONS_AT_ONCE = 256
"""Each may wait until it is open, or has confirmed what it inherited."""
MAX_LOOKUPS = 32
"""Partitions looked up concurrently for one request: timestamps may have to be read from the bucket."""


class _FoundOffset(NamedTuple):
    offset: int = -1
    timestamp: int = -1
    leader_epoch: int = -1


class _Duplicate(InvalidInput):
    """A partition appears twice. Kafka: INVALID_REQUEST (42)."""

    kafka_code = INVALID_REQUEST


class _UnknownSpecial(InvalidInput):
    """A special timestamp of a later version. Kafka: UNSUPPORTED_VERSION (35)."""

    kafka_code = UNSUPPORTED_VERSION


async def _find(log: PartitionLog, timestamp: int, *, committed: bool, shows_inherited: bool) -> _FoundOffset:
    if timestamp in _TIERED:
        return _FoundOffset()
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        start = log.told_log_start
        if start < 0:
            raise _not_available(log)
        return _FoundOffset(start, -1, log.epoch_at(start))
    found: tuple[int, int, int] | None = None
    if timestamp >= 0:
        found = await log.offset_for_timestamp(timestamp, committed=committed)
    if found is None and not shows_inherited:
        raise _not_available(log)
    if timestamp == LATEST:
        found = log.last_stable_offset if committed else log.high_watermark, -1, log.leader_epoch
    elif timestamp == MAX_TIMESTAMP:
        found = await log.offset_of_max_timestamp(committed=committed)
    return _FoundOffset() if found is None else _FoundOffset(*found)


def _not_available(log: PartitionLog) -> OffsetNotAvailable:
    return OffsetNotAvailable(f"{log.topic}-{log.partition} has not confirmed yet what its last leader appended")


def _is_known_at_once(log: PartitionLog, timestamp: int) -> bool:
    return timestamp in _TIERED or (timestamp in (EARLIEST, EARLIEST_LOCAL) and log.told_log_start >= 0)


def _check_special(timestamp: int, version: int) -> None:
    if timestamp < 0 and version < _FIRST_VERSION.get(timestamp, version + 1):
        raise _UnknownSpecial(f"ListOffsets v{version} has no special timestamp {timestamp}")


def _code(failure: TidelogError, version: int) -> int:
    if isinstance(failure, OffsetNotAvailable) and version < _FIRST_WITH_NOT_AVAILABLE:
        return LEADER_NOT_AVAILABLE
    return fetch_code(failure) if isinstance(failure, CorruptData) else failure.kafka_code


async def handle(context: RequestContext, request: ListOffsetsRequest) -> ListOffsetsResponse:
    """Look up all partitions concurrently."""
    committed = request.isolation_level == _READ_COMMITTED
    gate = asyncio.Semaphore(MAX_LOOKUPS)
    seen: set[tuple[str, int]] = set()
    repeated: set[tuple[str, int]] = set()
    for topic in request.topics:
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            (repeated if key in seen else seen).add(key)

    async def answer(name: str, wanted: ListOffsetsPartition) -> ListOffsetsPartitionResponse:
        index, timestamp = wanted.partition_index, wanted.timestamp
        error, found = 0, _FoundOffset()
        try:
            if (name, index) in repeated:
                raise _Duplicate(f"{name}-{index} appears twice in the request")
            log = await when_open(context.services.partitions, name, index)
            check_leader_epoch(log, wanted.current_leader_epoch)
            _check_special(timestamp, context.api_version)
            is_shown = _is_known_at_once(log, timestamp) or await log.wait_inherited()
            async with gate:
                found = await _find(log, timestamp, committed=committed, shows_inherited=is_shown)
        except TidelogError as failure:
            error = _code(failure, context.api_version)
        return ListOffsetsPartitionResponse(
            partition_index=index,
            error_code=error,
            timestamp=found.timestamp,
            offset=found.offset,
            leader_epoch=found.leader_epoch,
        )

    topics = []
    for topic in request.topics:
        partitions = await each(topic.partitions, functools.partial(answer, topic.name), _PARTITIONS_AT_ONCE)
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=partitions))
    return ListOffsetsResponse(topics=topics)


APIS = [serve(ListOffsetsRequest, 1, 11, handle)]
