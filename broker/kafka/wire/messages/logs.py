"""Messages about the logs of partitions and their producers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse, Message


class ListOffsetsPartition(Message):
    """An element of `ListOffsetsTopic.partitions`."""

    partition_index: int
    timestamp: int
    current_leader_epoch: int = -1  # v4+


class ListOffsetsTopic(Message):
    """An element of `ListOffsetsRequest.topics`."""

    name: str
    partitions: tuple[ListOffsetsPartition, ...]


class ListOffsetsRequest(KafkaRequest):
    """ListOffsets (2), versions 1 to 11."""

    API_KEY: ClassVar[int] = 2

    topics: tuple[ListOffsetsTopic, ...]
    isolation_level: int = 0  # v2+


class ListOffsetsPartitionResponse(Message):
    """An element of `ListOffsetsTopicResponse.partitions`."""

    partition_index: int
    error_code: int
    timestamp: int
    offset: int
    leader_epoch: int = -1  # v4+


class ListOffsetsTopicResponse(Message):
    """An element of `ListOffsetsResponse.topics`."""

    name: str
    partitions: Sequence[ListOffsetsPartitionResponse]


class ListOffsetsResponse(KafkaResponse):
    """ListOffsets (2), versions 1 to 11."""

    topics: Sequence[ListOffsetsTopicResponse]
    throttle_time_ms: int = 0


class DeleteRecordsPartition(Message):
    """An element of `DeleteRecordsTopic.partitions`."""

    partition_index: int
    offset: int


class DeleteRecordsTopic(Message):
    """An element of `DeleteRecordsRequest.topics`."""

    name: str
    partitions: tuple[DeleteRecordsPartition, ...]


class DeleteRecordsRequest(KafkaRequest):
    """DeleteRecords (21), versions 0 to 2."""

    API_KEY: ClassVar[int] = 21

    topics: tuple[DeleteRecordsTopic, ...]
    timeout_ms: int


class DeleteRecordsPartitionResult(Message):
    """An element of `DeleteRecordsTopicResult.partitions`."""

    partition_index: int
    low_watermark: int
    error_code: int


class DeleteRecordsTopicResult(Message):
    """An element of `DeleteRecordsResponse.topics`."""

    name: str
    partitions: Sequence[DeleteRecordsPartitionResult]


class DeleteRecordsResponse(KafkaResponse):
    """DeleteRecords (21), versions 0 to 2."""

    topics: Sequence[DeleteRecordsTopicResult]
    throttle_time_ms: int = 0


class OffsetForLeaderPartition(Message):
    """An element of `OffsetForLeaderTopic.partitions`."""

    partition: int
    current_leader_epoch: int
    leader_epoch: int


class OffsetForLeaderTopic(Message):
    """An element of `OffsetForLeaderEpochRequest.topics`."""

    topic: str
    partitions: tuple[OffsetForLeaderPartition, ...]


class OffsetForLeaderEpochRequest(KafkaRequest):
    """OffsetForLeaderEpoch (23), versions 2 to 4."""

    API_KEY: ClassVar[int] = 23

    topics: tuple[OffsetForLeaderTopic, ...]


class EpochEndOffset(Message):
    """An element of `OffsetForLeaderTopicResult.partitions`."""

    error_code: int
    partition: int
    leader_epoch: int
    end_offset: int


class OffsetForLeaderTopicResult(Message):
    """An element of `OffsetForLeaderEpochResponse.topics`."""

    topic: str
    partitions: Sequence[EpochEndOffset]


class OffsetForLeaderEpochResponse(KafkaResponse):
    """OffsetForLeaderEpoch (23), versions 2 to 4."""

    topics: Sequence[OffsetForLeaderTopicResult]
    throttle_time_ms: int = 0


class DescribableLogDirTopic(Message):
    """An element of `DescribeLogDirsRequest.topics`."""

    topic: str
    partitions: tuple[int, ...]


class DescribeLogDirsRequest(KafkaRequest):
    """DescribeLogDirs (35), versions 1 to 4."""

    API_KEY: ClassVar[int] = 35

    topics: tuple[DescribableLogDirTopic, ...] | None


class DescribeLogDirsPartition(Message):
    """An element of `DescribeLogDirsTopic.partitions`."""

    partition_index: int
    partition_size: int
    offset_lag: int
    is_future_key: bool


class DescribeLogDirsTopic(Message):
    """An element of `DescribeLogDirsResult.topics`."""

    name: str
    partitions: Sequence[DescribeLogDirsPartition]


class DescribeLogDirsResult(Message):
    """An element of `DescribeLogDirsResponse.results`."""

    error_code: int
    log_dir: str
    topics: Sequence[DescribeLogDirsTopic]
    total_bytes: int = -1  # v4+
    usable_bytes: int = -1  # v4+


class DescribeLogDirsResponse(KafkaResponse):
    """DescribeLogDirs (35), versions 1 to 4."""

    results: Sequence[DescribeLogDirsResult]
    error_code: int = 0  # v3+
    throttle_time_ms: int = 0


class DescribeProducersTopic(Message):
    """An element of `DescribeProducersRequest.topics`."""

    name: str
    partition_indexes: tuple[int, ...]


class DescribeProducersRequest(KafkaRequest):
    """DescribeProducers (61), version 0."""

    API_KEY: ClassVar[int] = 61

    topics: tuple[DescribeProducersTopic, ...]


class ActiveProducer(Message):
    """An element of `DescribeProducersPartitionResponse.active_producers`."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    current_txn_start_offset: int


class DescribeProducersPartitionResponse(Message):
    """An element of `DescribeProducersTopicResponse.partitions`."""

    partition_index: int
    error_code: int
    error_message: str | None
    active_producers: Sequence[ActiveProducer]


class DescribeProducersTopicResponse(Message):
    """An element of `DescribeProducersResponse.topics`."""

    name: str
    partitions: Sequence[DescribeProducersPartitionResponse]


class DescribeProducersResponse(KafkaResponse):
    """DescribeProducers (61), version 0."""

    topics: Sequence[DescribeProducersTopicResponse]
    throttle_time_ms: int = 0


class AlterReplicaLogDirTopic(Message):
    """An element of `AlterReplicaLogDir.topics`."""

    name: str
    partitions: tuple[int, ...]


class AlterReplicaLogDir(Message):
    """An element of `AlterReplicaLogDirsRequest.dirs`."""

    path: str
    topics: tuple[AlterReplicaLogDirTopic, ...]


class AlterReplicaLogDirsRequest(KafkaRequest):
    """AlterReplicaLogDirs (34), versions 1 to 2."""

    API_KEY: ClassVar[int] = 34

    dirs: tuple[AlterReplicaLogDir, ...]


class AlterReplicaLogDirPartitionResult(Message):
    """An element of `AlterReplicaLogDirTopicResult.partitions`."""

    partition_index: int
    error_code: int


class AlterReplicaLogDirTopicResult(Message):
    """An element of `AlterReplicaLogDirsResponse.results`."""

    topic_name: str
    partitions: Sequence[AlterReplicaLogDirPartitionResult]


class AlterReplicaLogDirsResponse(KafkaResponse):
    """AlterReplicaLogDirs (34), versions 1 to 2."""

    results: Sequence[AlterReplicaLogDirTopicResult]
    throttle_time_ms: int = 0
