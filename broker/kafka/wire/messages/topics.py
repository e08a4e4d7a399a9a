"""Messages that create, delete, describe and move topics and partitions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import ClassVar

from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse, Message


class CreatableReplicaAssignment(Message):
    """An element of `CreatableTopic.assignments`."""

    partition_index: int
    broker_ids: tuple[int, ...]


class CreatableTopicConfig(Message):
    """An element of `CreatableTopic.configs`."""

    name: str
    value: str | None


class CreatableTopic(Message):
    """An element of `CreateTopicsRequest.topics`."""

    name: str
    num_partitions: int
    replication_factor: int
    assignments: tuple[CreatableReplicaAssignment, ...]
    configs: tuple[CreatableTopicConfig, ...]


class CreateTopicsRequest(KafkaRequest):
    """CreateTopics (19), versions 2 to 7."""

    API_KEY: ClassVar[int] = 19

    topics: tuple[CreatableTopic, ...]
    timeout_ms: int
    validate_only: bool


class CreatedTopicConfig(Message):
    """An element of `CreatableTopicResult.configs`."""

    name: str
    value: str | None
    read_only: bool
    config_source: int
    is_sensitive: bool


class CreatableTopicResult(Message):
    """An element of `CreateTopicsResponse.topics`."""

    name: str
    error_code: int
    error_message: str | None
    num_partitions: int = -1  # v5+
    replication_factor: int = -1  # v5+
    configs: Sequence[CreatedTopicConfig] = ()  # v5+
    topic_id: uuid.UUID | None = None  # v7+


class CreateTopicsResponse(KafkaResponse):
    """CreateTopics (19), versions 2 to 7."""

    topics: Sequence[CreatableTopicResult]
    throttle_time_ms: int = 0


class DeleteTopicState(Message):
    """An element of `DeleteTopicsRequest.topics`."""

    name: str | None
    topic_id: uuid.UUID | None


class DeleteTopicsRequest(KafkaRequest):
    """DeleteTopics (20), versions 1 to 6."""

    API_KEY: ClassVar[int] = 20

    timeout_ms: int
    topic_names: tuple[str, ...] = ()  # v1 to v5
    topics: tuple[DeleteTopicState, ...] = ()  # v6+


class DeletableTopicResult(Message):
    """An element of `DeleteTopicsResponse.responses`."""

    name: str | None
    error_code: int
    error_message: str | None = None  # v5+
    topic_id: uuid.UUID | None = None  # v6+


class DeleteTopicsResponse(KafkaResponse):
    """DeleteTopics (20), versions 1 to 6."""

    responses: Sequence[DeletableTopicResult]
    throttle_time_ms: int = 0


class CreatePartitionsAssignment(Message):
    """An element of `CreatePartitionsTopic.assignments`."""

    broker_ids: tuple[int, ...]


class CreatePartitionsTopic(Message):
    """An element of `CreatePartitionsRequest.topics`."""

    name: str
    count: int
    assignments: tuple[CreatePartitionsAssignment, ...] | None


class CreatePartitionsRequest(KafkaRequest):
    """CreatePartitions (37), versions 0 to 3."""

    API_KEY: ClassVar[int] = 37

    topics: tuple[CreatePartitionsTopic, ...]
    timeout_ms: int
    validate_only: bool


class CreatePartitionsTopicResult(Message):
    """An element of `CreatePartitionsResponse.results`."""

    name: str
    error_code: int
    error_message: str | None


class CreatePartitionsResponse(KafkaResponse):
    """CreatePartitions (37), versions 0 to 3."""

    results: Sequence[CreatePartitionsTopicResult]
    throttle_time_ms: int = 0


class DescribeTopicPartitionsTopic(Message):
    """An element of `DescribeTopicPartitionsRequest.topics`."""

    name: str


class DescribeTopicPartitionsCursor(Message):
    """`DescribeTopicPartitionsRequest.cursor`."""

    topic_name: str
    partition_index: int


class DescribeTopicPartitionsRequest(KafkaRequest):
    """DescribeTopicPartitions (75), version 0."""

    API_KEY: ClassVar[int] = 75

    topics: tuple[DescribeTopicPartitionsTopic, ...]
    response_partition_limit: int
    cursor: DescribeTopicPartitionsCursor | None


class DescribeTopicPartitionsResponsePartition(Message):
    """An element of `DescribeTopicPartitionsResponseTopic.partitions`."""

    error_code: int
    partition_index: int
    leader_id: int
    leader_epoch: int
    replica_nodes: Sequence[int]
    isr_nodes: Sequence[int]
    eligible_leader_replicas: Sequence[int] | None
    last_known_elr: Sequence[int] | None
    offline_replicas: Sequence[int]


class DescribeTopicPartitionsResponseTopic(Message):
    """An element of `DescribeTopicPartitionsResponse.topics`."""

    error_code: int
    name: str | None
    topic_id: uuid.UUID | None
    is_internal: bool
    partitions: Sequence[DescribeTopicPartitionsResponsePartition]
    topic_authorized_operations: int


class DescribeTopicPartitionsResponse(KafkaResponse):
    """DescribeTopicPartitions (75), version 0."""

    topics: Sequence[DescribeTopicPartitionsResponseTopic]
    next_cursor: DescribeTopicPartitionsCursor | None
    throttle_time_ms: int = 0


class ElectLeadersTopic(Message):
    """An element of `ElectLeadersRequest.topic_partitions`."""

    topic: str
    partitions: tuple[int, ...]


class ElectLeadersRequest(KafkaRequest):
    """ElectLeaders (43), versions 0 to 2."""

    API_KEY: ClassVar[int] = 43

    topic_partitions: tuple[ElectLeadersTopic, ...] | None
    timeout_ms: int
    election_type: int = 0  # v1+


class ElectLeadersPartitionResult(Message):
    """An element of `ReplicaElectionResult.partition_result`."""

    partition_id: int
    error_code: int
    error_message: str | None


class ReplicaElectionResult(Message):
    """An element of `ElectLeadersResponse.replica_election_results`."""

    topic: str
    partition_result: Sequence[ElectLeadersPartitionResult]


class ElectLeadersResponse(KafkaResponse):
    """ElectLeaders (43), versions 0 to 2."""

    replica_election_results: Sequence[ReplicaElectionResult]
    error_code: int = 0  # v1+
    throttle_time_ms: int = 0


class ReassignablePartition(Message):
    """An element of `ReassignableTopic.partitions`."""

    partition_index: int
    replicas: tuple[int, ...] | None


class ReassignableTopic(Message):
    """An element of `AlterPartitionReassignmentsRequest.topics`."""

    name: str
    partitions: tuple[ReassignablePartition, ...]


class AlterPartitionReassignmentsRequest(KafkaRequest):
    """AlterPartitionReassignments (45), versions 0 to 1."""

    API_KEY: ClassVar[int] = 45

    topics: tuple[ReassignableTopic, ...]
    allow_replication_factor_change: bool = True  # v1+


class ReassignablePartitionResponse(Message):
    """An element of `ReassignableTopicResponse.partitions`."""

    partition_index: int
    error_code: int
    error_message: str | None


class ReassignableTopicResponse(Message):
    """An element of `AlterPartitionReassignmentsResponse.responses`."""

    name: str
    partitions: Sequence[ReassignablePartitionResponse]


class AlterPartitionReassignmentsResponse(KafkaResponse):
    """AlterPartitionReassignments (45), versions 0 to 1."""

    error_code: int
    error_message: str | None
    responses: Sequence[ReassignableTopicResponse]
    allow_replication_factor_change: bool = True  # v1+
    throttle_time_ms: int = 0


class ListPartitionReassignmentsTopic(Message):
    """An element of `ListPartitionReassignmentsRequest.topics`."""

    name: str
    partition_indexes: tuple[int, ...]


class ListPartitionReassignmentsRequest(KafkaRequest):
    """ListPartitionReassignments (46), version 0."""

    API_KEY: ClassVar[int] = 46

    topics: tuple[ListPartitionReassignmentsTopic, ...] | None


class OngoingPartitionReassignment(Message):
    """An element of `OngoingTopicReassignment.partitions`."""

    partition_index: int
    replicas: Sequence[int]
    adding_replicas: Sequence[int]
    removing_replicas: Sequence[int]


class OngoingTopicReassignment(Message):
    """An element of `ListPartitionReassignmentsResponse.topics`."""

    name: str
    partitions: Sequence[OngoingPartitionReassignment]


class ListPartitionReassignmentsResponse(KafkaResponse):
    """ListPartitionReassignments (46), version 0."""

    error_code: int
    error_message: str | None
    topics: Sequence[OngoingTopicReassignment]
    throttle_time_ms: int = 0
