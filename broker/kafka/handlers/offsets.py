"""Committed offsets: OffsetCommit, OffsetFetch, OffsetDelete.

The metadata string and the leader epoch of a commit are returned unchanged. `require_stable` (v7+) requests
UNSTABLE_OFFSET_COMMIT in place of an offset that an open transaction may change (KIP-447). Commits in transactions are
in `tidelog.broker.kafka.handlers.txn_offsets`.

Entry: `APIS`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.records import MAX_STRING_BYTES, NO_TIMESTAMP, OffsetKey, OffsetValue
from tidelog.broker.kafka.errors import UNKNOWN_TOPIC_ID
from tidelog.broker.kafka.handlers.named_topics import FIRST_WITH_TOPIC_IDS, id_of, with_names
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.offsets import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)
from tidelog.broker.partitions.topic_config import INT64_MAX
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.steps import paced

NO_OFFSET = OffsetValue(-1, -1, "", NO_TIMESTAMP)
"""The value for a partition without a committed offset."""


async def offset_commit(context: RequestContext, request: OffsetCommitRequest) -> OffsetCommitResponse:
    """OffsetCommit v2–v10. Partitions that cannot be committed are refused individually; the others are committed."""
    now_ms = context.services.clock.time_ms()
    retention_ms = request.retention_time_ms
    expire_ms = min(now_ms + retention_ms, INT64_MAX) if retention_ms >= 0 else NO_TIMESTAMP
    errors: dict[tuple[str, int], int] = {}
    offsets: list[tuple[OffsetKey, OffsetValue]] = []
    named = with_names(context, request.topics)
    for topic in named:
        async for one in paced(topic.partitions):
            at = (topic.name, one.partition_index)
            metadata = one.committed_metadata or ""
            errors[at] = commit_error(context, *at, metadata)
            if errors[at] == 0:
                epoch = one.committed_leader_epoch
                record = context.services.controller.image.topic(topic.name)
                topic_id = record.id if record is not None else b""
                value = OffsetValue(one.committed_offset, epoch, metadata, now_ms, expire_ms, topic_id)
                offsets.append((OffsetKey(request.group_id, *at), value))
    identity = MemberIdentity(request.member_id, request.group_instance_id)
    try:
        outcome = int(
            await context.services.groups.commit(
                request.group_id, identity, request.generation_id_or_member_epoch, offsets
            )
        )
    except TidelogError as error:
        outcome = error.kafka_code
    topics = [
        OffsetCommitResponseTopic(
            name=topic.name,
            topic_id=topic.topic_id,
            partitions=[
                OffsetCommitResponsePartition(
                    partition_index=one.partition_index,
                    error_code=errors[topic.name, one.partition_index] or outcome,
                )
                for one in topic.partitions
            ],
        )
        for topic in named
    ]
    return OffsetCommitResponse(topics=topics)


def commit_error(context: RequestContext, topic: str, partition: int, metadata: str) -> int:
    """Why an offset of this partition cannot be committed, with this metadata string: a Kafka error code, or 0."""
    record = context.services.controller.image.topic(topic)
    if record is None and context.api_version >= FIRST_WITH_TOPIC_IDS:
        return UNKNOWN_TOPIC_ID
    if record is None or not 0 <= partition < record.partitions:
        return GroupError.UNKNOWN_TOPIC_OR_PARTITION
    limit = min(context.services.group.offset_metadata_max_bytes, MAX_STRING_BYTES)
    return GroupError.OFFSET_METADATA_TOO_LARGE if len(metadata.encode()) > limit else GroupError.NONE


async def offset_fetch(context: RequestContext, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """OffsetFetch v1–v10: one group, from v8 on several. Null topics (v2+) are all topics with offsets.

    A group that is named several times is refused, once: the answer could be thousands of times the request.
    """
    if context.api_version >= 8:
        groups: dict[str, OffsetFetchResponseGroup] = {}
        async for group in paced(request.groups):
            name = group.group_id
            if name in groups:
                refused = GroupError.INVALID_REQUEST
                groups[name] = OffsetFetchResponseGroup(group_id=name, topics=[], error_code=refused)
            else:
                groups[name] = await _fetched_group(context, group, request.require_stable)
        return OffsetFetchResponse(groups=list(groups.values()))
    found = await _fetch(context, request.group_id, request.topics, request.require_stable)
    return OffsetFetchResponse(topics=_fetched(found), error_code=found.error)


async def _fetched_group(
    context: RequestContext, group: OffsetFetchRequestGroup, require_stable: bool
) -> OffsetFetchResponseGroup:
    if context.api_version >= FIRST_WITH_TOPIC_IDS:
        return await _fetched_by_id(context, group, require_stable)
    found = await _fetch(context, group.group_id, group.topics, require_stable)
    return OffsetFetchResponseGroup(
        group_id=group.group_id, topics=[] if found.error else _fetched(found), error_code=found.error
    )


async def _fetched_by_id(
    context: RequestContext, group: OffsetFetchRequestGroup, require_stable: bool
) -> OffsetFetchResponseGroup:
    """Return the answer with the topics' ids. Of all topics those are left out that have been deleted."""
    named = None if group.topics is None else with_names(context, group.topics)
    known = None if named is None else [topic for topic in named if topic.name]
    found = await _fetch(context, group.group_id, known, require_stable)
    if found.error:
        return OffsetFetchResponseGroup(group_id=group.group_id, topics=[], error_code=found.error)
    ids = {topic.name: topic.topic_id for topic in known or ()}
    with_ids = [(answer, ids.get(answer.name) or id_of(context, answer.name)) for answer in _fetched(found)]
    answers = [
        msgspec.structs.replace(answer, topic_id=topic_id) for answer, topic_id in with_ids if topic_id is not None
    ]
    for topic in named or ():
        if not topic.name:
            values = [_partition(each, None, UNKNOWN_TOPIC_ID) for each in topic.partition_indexes]
            answers.append(OffsetFetchResponseTopic(topic_id=topic.topic_id, partitions=values))
    return OffsetFetchResponseGroup(group_id=group.group_id, topics=answers, error_code=0)


class _GroupOffsets(NamedTuple):
    error: int
    """Of the group."""
    offsets: dict[str, dict[int, OffsetValue | None]]
    unstable: Collection[tuple[str, int]] = ()


async def _fetch(
    context: RequestContext, group_id: str, topics: Sequence[OffsetFetchRequestTopic] | None, require_stable: bool
) -> _GroupOffsets:
    wanted: dict[str, list[int]] | None = None if topics is None else {}
    for topic in topics or ():
        assert wanted is not None
        wanted.setdefault(topic.name, []).extend(topic.partition_indexes)  # a topic may appear twice
    groups = context.services.groups
    await groups.arrival(group_id)
    try:
        offsets = groups.committed(group_id, wanted)
        unstable = groups.unstable(group_id) if require_stable else ()
    except TidelogError as error:
        unknown = {name: dict.fromkeys(partitions) for name, partitions in (wanted or {}).items()}
        return _GroupOffsets(error.kafka_code, unknown)
    if wanted is None:  # a partition of which there is no offset before the first transaction is committed
        for name, partition in unstable:
            offsets.setdefault(name, {}).setdefault(partition, None)
    return _GroupOffsets(0, offsets, unstable)


def _fetched(found: _GroupOffsets) -> list[OffsetFetchResponseTopic]:
    """Return the topics of a response. v0 and v1 have errors per partition only, so all versions have them there."""
    answers = []
    for topic, partitions in found.offsets.items():
        values = []
        for partition, one in partitions.items():
            is_unstable = (topic, partition) in found.unstable
            error = GroupError.UNSTABLE_OFFSET_COMMIT if is_unstable else found.error
            values.append(_partition(partition, None if is_unstable else one, error))
        answers.append(OffsetFetchResponseTopic(name=topic, partitions=values))
    return answers


def _partition(index: int, found: OffsetValue | None, error: int) -> OffsetFetchResponsePartition:
    value = found or NO_OFFSET
    return OffsetFetchResponsePartition(
        partition_index=index,
        committed_offset=value.offset,
        committed_leader_epoch=value.leader_epoch,
        metadata=value.metadata,
        error_code=error,
    )


async def offset_delete(context: RequestContext, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
    """OffsetDelete v0: refused for a topic that a member is subscribed to."""
    if not request.group_id:
        return OffsetDeleteResponse(error_code=GroupError.INVALID_GROUP_ID, topics=[])
    wanted = [(topic.name, one.partition_index) for topic in request.topics for one in topic.partitions]
    image = context.services.controller.image
    unknown = {at for at in wanted if (record := image.topic(at[0])) is None or not 0 <= at[1] < record.partitions}
    known = [at for at in dict.fromkeys(wanted) if at not in unknown]
    try:
        error, results = await context.services.groups.delete_offsets(request.group_id, known)
    except TidelogError as failure:
        return OffsetDeleteResponse(error_code=failure.kafka_code, topics=[])
    if error is not GroupError.NONE:
        return OffsetDeleteResponse(error_code=error, topics=[])
    errors = dict(zip(known, results, strict=True)) | dict.fromkeys(unknown, GroupError.UNKNOWN_TOPIC_OR_PARTITION)
    topics = [
        OffsetDeleteResponseTopic(
            name=topic.name,
            partitions=[
                OffsetDeleteResponsePartition(
                    partition_index=one.partition_index,
                    error_code=errors[topic.name, one.partition_index],
                )
                for one in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return OffsetDeleteResponse(error_code=0, topics=topics)


APIS = [
    serve(OffsetCommitRequest, 2, 10, offset_commit),
    serve(OffsetFetchRequest, 1, 10, offset_fetch),
    serve(OffsetDeleteRequest, 0, 0, offset_delete),
]
