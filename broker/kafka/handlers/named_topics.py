"""Topics that a request names, by name or from some version on by id.

The offsets of a group are kept by the topic's name, so an id is looked up at the beginning of a request, and a name at
its end. An id that no topic has is answered with UNKNOWN_TOPIC_ID, by partition.

Entry: `with_names`, `id_of`, `partitions_by_topic`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from tidelog.broker.kafka.services import RequestContext
from tidelog.broker.kafka.wire.messages.offsets import OffsetCommitRequestTopic, OffsetFetchRequestTopic

FIRST_WITH_TOPIC_IDS = 10
"""The first version of OffsetCommit and OffsetFetch that names topics by their ids."""

T = TypeVar("T", OffsetCommitRequestTopic, OffsetFetchRequestTopic)


class _TopicWithPartitions(Protocol):
    @property
    def topic(self) -> str: ...

    @property
    def partitions(self) -> tuple[int, ...]: ...


def partitions_by_topic(topics: Iterable[_TopicWithPartitions]) -> dict[str, list[int]]:
    """Return the partitions that a request names of each topic, each once.

    A topic may be named again: librdkafka begins another element wherever the next partition is of another topic.
    """
    found: dict[str, dict[int, None]] = {}
    for topic in topics:
        found.setdefault(topic.topic, {}).update(dict.fromkeys(topic.partitions))
    return {name: list(indexes) for name, indexes in found.items()}


def with_names(context: RequestContext, topics: Iterable[T]) -> tuple[T, ...]:
    """Return a request's topics with their names; the name of a topic that is given by an unknown id is empty."""
    if context.api_version < FIRST_WITH_TOPIC_IDS:
        return tuple(topics)
    found = context.services.controller.image.topics
    named = []
    for topic in topics:
        record = found.get(topic.topic_id.bytes) if topic.topic_id is not None else None
        named.append(msgspec.structs.replace(topic, name=record.name if record is not None else ""))
    return tuple(named)


def id_of(context: RequestContext, name: str) -> uuid.UUID | None:
    """Return the id of a topic, for an answer; None if it was deleted meanwhile."""
    record = context.services.controller.image.topic(name)
    return uuid.UUID(bytes=record.id) if record is not None else None
