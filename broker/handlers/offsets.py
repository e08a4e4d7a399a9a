"""Committed offsets: OffsetCommit, OffsetFetch, OffsetDelete.

The metadata string and the leader epoch of a commit come back as they were given. `require_stable` (v7+) asks to be
told of offsets in open transactions; there are none before transactions are served, so every offset is stable.

Entry: `APIS`.
"""

from __future__ import annotations

from typing import Any

from broker.groups.errors import GroupError
from broker.groups.members import MemberIdentity
from broker.groups.records import MAX_STRING_BYTES, NO_TIMESTAMP, OffsetKey, OffsetValue
from broker.services import ApiHandler, RequestContext
from broker.wire import schema
from broker.wire.schema import to_ms
from runtime.errors import TidelogError

NO_OFFSET = OffsetValue(-1, -1, "", NO_TIMESTAMP)
"""The answer for a partition without a committed offset."""


async def offset_commit(context: RequestContext, request: Any) -> Any:
    """OffsetCommit v2–v9. Partitions that cannot be committed are refused one by one; the others go on."""
    now_ms = context.services.clock.time_ms()
    retention_ms = to_ms(request.retention_time) if hasattr(request, "retention_time") else -1
    expire_ms = now_ms + retention_ms if retention_ms >= 0 else NO_TIMESTAMP
    errors: dict[tuple[str, int], int] = {}
    offsets: list[tuple[OffsetKey, OffsetValue]] = []
    for topic in request.topics:
        for one in topic.partitions:
            at = (topic.name, one.partition_index)
            metadata = one.committed_metadata or ""
            errors[at] = _commit_error(context, *at, metadata)
            if errors[at] == 0:
                epoch = getattr(one, "committed_leader_epoch", -1)
                record = context.services.controller.image.topic(topic.name)
                topic_id = record.id if record is not None else b""
                value = OffsetValue(one.committed_offset, epoch, metadata, now_ms, expire_ms, topic_id)
                offsets.append((OffsetKey(request.group_id, *at), value))
    identity = MemberIdentity(request.member_id, getattr(request, "group_instance_id", None))
    try:
        outcome = int(
            await context.services.groups.commit(
                request.group_id, identity, request.generation_id_or_member_epoch, offsets
            )
        )
    except TidelogError as error:
        outcome = error.kafka_code
    s = schema.response(context.api_key, context.api_version)
    topics = [
        s.make(
            "OffsetCommitResponseTopic",
            name=topic.name,
            partitions=[
                s.make(
                    "OffsetCommitResponsePartition",
                    partition_index=one.partition_index,
                    error_code=errors[topic.name, one.partition_index] or outcome,
                )
                for one in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return s.make("OffsetCommitResponse", throttle_time=0, topics=topics)


def _commit_error(context: RequestContext, topic: str, partition: int, metadata: str) -> int:
    record = context.services.controller.image.topic(topic)
    if record is None or not 0 <= partition < record.partitions:
        return GroupError.UNKNOWN_TOPIC_OR_PARTITION
    limit = min(context.services.group.offset_metadata_max_bytes, MAX_STRING_BYTES)
    return GroupError.OFFSET_METADATA_TOO_LARGE if len(metadata.encode()) > limit else GroupError.NONE


async def offset_fetch(context: RequestContext, request: Any) -> Any:
    """OffsetFetch v1–v9: one group, from v8 on many. Null topics (v2+) are all topics with offsets."""
    s = schema.response(context.api_key, context.api_version)
    if context.api_version >= 8:
        groups = [await _fetched_group(context, s, group) for group in request.groups]
        return s.make("OffsetFetchResponse", throttle_time=0, groups=groups)
    error, topics = await _fetch(context, request.group_id, request.topics)
    named = "OffsetFetchResponseTopic", "OffsetFetchResponsePartition"
    return s.make("OffsetFetchResponse", throttle_time=0, topics=_fetched(s, named, topics, error), error_code=error)


async def _fetched_group(context: RequestContext, s: schema.Schema, group: Any) -> Any:
    error, topics = await _fetch(context, group.group_id, group.topics)
    named = "OffsetFetchResponseTopics", "OffsetFetchResponsePartitions"
    answers = [] if error else _fetched(s, named, topics, 0)
    return s.make("OffsetFetchResponseGroup", group_id=group.group_id, topics=answers, error_code=error)


_Offsets = dict[str, dict[int, OffsetValue | None]]


async def _fetch(context: RequestContext, group_id: str, topics: Any) -> tuple[int, _Offsets]:
    wanted: dict[str, list[int]] | None = None if topics is None else {}
    for topic in topics or ():
        assert wanted is not None
        wanted.setdefault(topic.name, []).extend(topic.partition_indexes)  # a topic may be named twice
    await context.services.groups.arrival(group_id)
    try:
        return 0, context.services.groups.committed(group_id, wanted)
    except TidelogError as error:
        unknown = {name: dict.fromkeys(partitions) for name, partitions in (wanted or {}).items()}
        return error.kafka_code, unknown


def _fetched(s: schema.Schema, named: tuple[str, str], topics: _Offsets, error: int) -> list[Any]:
    """The topics of an answer. v0 and v1 know errors by partition only; so they are given there in any version."""
    topic_name, partition_name = named
    answers = []
    for topic, partitions in topics.items():
        values = []
        for partition, found in partitions.items():
            value = found or NO_OFFSET
            values.append(
                s.make(
                    partition_name,
                    partition_index=partition,
                    committed_offset=value.offset,
                    committed_leader_epoch=value.leader_epoch,
                    metadata=value.metadata,
                    error_code=error,
                )
            )
        answers.append(s.make(topic_name, name=topic, partitions=values))
    return answers


async def offset_delete(context: RequestContext, request: Any) -> Any:
    """OffsetDelete v0: refused for a topic that a member is subscribed to."""
    s = schema.response(context.api_key, context.api_version)
    wanted = [(topic.name, one.partition_index) for topic in request.topics for one in topic.partitions]
    image = context.services.controller.image
    unknown = {at for at in wanted if (record := image.topic(at[0])) is None or not 0 <= at[1] < record.partitions}
    known = [at for at in dict.fromkeys(wanted) if at not in unknown]
    try:
        error, results = await context.services.groups.delete_offsets(request.group_id, known)
    except TidelogError as failure:
        return s.make("OffsetDeleteResponse", error_code=failure.kafka_code, throttle_time=0, topics=[])
    if error is not GroupError.NONE:
        return s.make("OffsetDeleteResponse", error_code=error, throttle_time=0, topics=[])
    errors = dict(zip(known, results, strict=True)) | dict.fromkeys(unknown, GroupError.UNKNOWN_TOPIC_OR_PARTITION)
    topics = [
        s.make(
            "OffsetDeleteResponseTopic",
            name=topic.name,
            partitions=[
                s.make(
                    "OffsetDeleteResponsePartition",
                    partition_index=one.partition_index,
                    error_code=errors[topic.name, one.partition_index],
                )
                for one in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return s.make("OffsetDeleteResponse", error_code=0, throttle_time=0, topics=topics)


APIS = [
    ApiHandler(8, 2, 9, offset_commit),
    ApiHandler(9, 1, 9, offset_fetch),
    ApiHandler(47, 0, 0, offset_delete),
]
