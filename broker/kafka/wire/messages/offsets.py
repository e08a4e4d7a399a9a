"""Messages about committed offsets: OffsetCommit, OffsetFetch, OffsetDelete, TxnOffsetCommit."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import ClassVar

from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse, Message


class OffsetCommitRequestPartition(Message):
    """An element of `OffsetCommitRequestTopic.partitions`."""

    partition_index: int
    committed_offset: int
    committed_metadata: str | None
    committed_leader_epoch: int = -1  # v6+


class OffsetCommitRequestTopic(Message):
    """An element of `OffsetCommitRequest.topics`."""

    partitions: tuple[OffsetCommitRequestPartition, ...]
    name: str = ""  # up to v9
    topic_id: uuid.UUID | None = None  # v10+


class OffsetCommitRequest(KafkaRequest):
    """OffsetCommit (8), versions 2 to 10."""

    API_KEY: ClassVar[int] = 8

    group_id: str
    generation_id_or_member_epoch: int
    member_id: str
    topics: tuple[OffsetCommitRequestTopic, ...]
    retention_time_ms: int = -1  # v2 to v4
    group_instance_id: str | None = None  # v7+


class OffsetCommitResponsePartition(Message):
    """An element of `OffsetCommitResponseTopic.partitions`."""

    partition_index: int
    error_code: int


class OffsetCommitResponseTopic(Message):
    """An element of `OffsetCommitResponse.topics`."""

    partitions: Sequence[OffsetCommitResponsePartition]
    name: str = ""  # up to v9
    topic_id: uuid.UUID | None = None  # v10+


class OffsetCommitResponse(KafkaResponse):
    """OffsetCommit (8), versions 2 to 10."""

    topics: Sequence[OffsetCommitResponseTopic]
    throttle_time_ms: int = 0


class OffsetFetchRequestTopic(Message):
    """An element of `OffsetFetchRequest.topics`."""

    partition_indexes: tuple[int, ...]
    name: str = ""  # up to v9
    topic_id: uuid.UUID | None = None  # v10+


class OffsetFetchRequestGroup(Message):
    """An element of `OffsetFetchRequest.groups`."""

    group_id: str
    topics: tuple[OffsetFetchRequestTopic, ...] | None


class OffsetFetchRequest(KafkaRequest):
    """OffsetFetch (9), versions 1 to 10."""

    API_KEY: ClassVar[int] = 9

    group_id: str = ""  # v1 to v7
    topics: tuple[OffsetFetchRequestTopic, ...] | None = ()  # v1 to v7
    groups: tuple[OffsetFetchRequestGroup, ...] = ()  # v8+
    require_stable: bool = False  # v7+


class OffsetFetchResponsePartition(Message):
    """An element of `OffsetFetchResponseTopic.partitions`."""

    partition_index: int
    committed_offset: int
    metadata: str | None
    error_code: int
    committed_leader_epoch: int = -1  # v5+


class OffsetFetchResponseTopic(Message):
    """An element of `OffsetFetchResponse.topics`."""

    partitions: Sequence[OffsetFetchResponsePartition]
    name: str = ""  # up to v9
    topic_id: uuid.UUID | None = None  # v10+


class OffsetFetchResponseGroup(Message):
    """An element of `OffsetFetchResponse.groups`."""

    group_id: str
    topics: Sequence[OffsetFetchResponseTopic]
    error_code: int


class OffsetFetchResponse(KafkaResponse):
    """OffsetFetch (9), versions 1 to 10."""

    topics: Sequence[OffsetFetchResponseTopic] = ()  # v1 to v7
    error_code: int = 0  # v2 to v7
    groups: Sequence[OffsetFetchResponseGroup] = ()  # v8+
    throttle_time_ms: int = 0


class OffsetDeleteRequestPartition(Message):
    """An element of `OffsetDeleteRequestTopic.partitions`."""

    partition_index: int


class OffsetDeleteRequestTopic(Message):
    """An element of `OffsetDeleteRequest.topics`."""

    name: str
    partitions: tuple[OffsetDeleteRequestPartition, ...]


class OffsetDeleteRequest(KafkaRequest):
    """OffsetDelete (47), version 0."""

    API_KEY: ClassVar[int] = 47

    group_id: str
    topics: tuple[OffsetDeleteRequestTopic, ...]


class OffsetDeleteResponsePartition(Message):
    """An element of `OffsetDeleteResponseTopic.partitions`."""

    partition_index: int
    error_code: int


class OffsetDeleteResponseTopic(Message):
    """An element of `OffsetDeleteResponse.topics`."""

    name: str
    partitions: Sequence[OffsetDeleteResponsePartition]


class OffsetDeleteResponse(KafkaResponse):
    """OffsetDelete (47), version 0."""

    error_code: int
    topics: Sequence[OffsetDeleteResponseTopic]
    throttle_time_ms: int = 0


class TxnOffsetCommitRequestPartition(Message):
    """An element of `TxnOffsetCommitRequestTopic.partitions`."""

    partition_index: int
    committed_offset: int
    committed_metadata: str | None
    committed_leader_epoch: int = -1  # v2+


class TxnOffsetCommitRequestTopic(Message):
    """An element of `TxnOffsetCommitRequest.topics`."""

    name: str
    partitions: tuple[TxnOffsetCommitRequestPartition, ...]


class TxnOffsetCommitRequest(KafkaRequest):
    """TxnOffsetCommit (28), versions 0 to 5."""

    API_KEY: ClassVar[int] = 28

    transactional_id: str
    group_id: str
    producer_id: int
    producer_epoch: int
    topics: tuple[TxnOffsetCommitRequestTopic, ...]
    generation_id: int = -1  # v3+
    member_id: str = ""  # v3+
    group_instance_id: str | None = None  # v3+


class TxnOffsetCommitResponsePartition(Message):
    """An element of `TxnOffsetCommitResponseTopic.partitions`."""

    partition_index: int
    error_code: int


class TxnOffsetCommitResponseTopic(Message):
    """An element of `TxnOffsetCommitResponse.topics`."""

    name: str
    partitions: Sequence[TxnOffsetCommitResponsePartition]


class TxnOffsetCommitResponse(KafkaResponse):
    """TxnOffsetCommit (28), versions 0 to 5."""

    topics: Sequence[TxnOffsetCommitResponseTopic]
    throttle_time_ms: int = 0
