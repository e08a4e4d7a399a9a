"""Messages about the cluster and what it serves: Metadata, ApiVersions, brokers, controllers, ACLs, quotas."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import ClassVar

from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse, Message


class MetadataRequestTopic(Message):
    """An element of `MetadataRequest.topics`."""

    name: str | None
    topic_id: uuid.UUID | None = None  # v10+


class MetadataRequest(KafkaRequest):
    """Metadata (3), versions 0 to 13."""

    API_KEY: ClassVar[int] = 3

    topics: tuple[MetadataRequestTopic, ...] | None
    allow_auto_topic_creation: bool = True  # v4+
    include_cluster_authorized_operations: bool = False  # v8 to v10
    include_topic_authorized_operations: bool = False  # v8+


class MetadataResponseBroker(Message):
    """An element of `MetadataResponse.brokers`."""

    node_id: int
    host: str
    port: int
    rack: str | None = None  # v1+


class MetadataResponse(KafkaResponse):
    """Metadata (3), versions 0 to 13."""

    brokers: Sequence[MetadataResponseBroker]
    topics: tuple[()] = ()
    """Always empty: they are encoded by `tidelog.broker.kafka.wire.metadata`."""
    controller_id: int = -1  # v1+
    cluster_id: str | None = None  # v2+
    cluster_authorized_operations: int = -(1 << 31)  # v8 to v10
    error_code: int = 0  # v13+
    throttle_time_ms: int = 0


class ApiVersionsRequest(KafkaRequest):
    """ApiVersions (18), versions 0 to 4."""

    API_KEY: ClassVar[int] = 18

    client_software_name: str = ""  # v3+
    client_software_version: str = ""  # v3+


class ServedApi(Message):
    """An element of `ApiVersionsResponse.api_keys`."""

    api_key: int
    min_version: int
    max_version: int


class SupportedFeatureKey(Message):
    """An element of `ApiVersionsResponse.supported_features`."""

    name: str
    min_version: int
    max_version: int


class FinalizedFeatureKey(Message):
    """An element of `ApiVersionsResponse.finalized_features`."""

    name: str
    max_version_level: int
    min_version_level: int


class ApiVersionsResponse(KafkaResponse):
    """ApiVersions (18), versions 0 to 4."""

    error_code: int
    api_keys: Sequence[ServedApi]
    supported_features: Sequence[SupportedFeatureKey] = ()  # v3+
    finalized_features_epoch: int = -1  # v3+
    finalized_features: Sequence[FinalizedFeatureKey] = ()  # v3+
    throttle_time_ms: int = 0


class FeatureUpdateKey(Message):
    """An element of `UpdateFeaturesRequest.feature_updates`."""

    feature: str
    max_version_level: int
    allow_downgrade: bool = False  # v0
    upgrade_type: int = 1  # v1+


class UpdateFeaturesRequest(KafkaRequest):
    """UpdateFeatures (57), versions 0 to 2."""

    API_KEY: ClassVar[int] = 57

    timeout_ms: int
    feature_updates: tuple[FeatureUpdateKey, ...]
    validate_only: bool = False  # v1+


class UpdatableFeatureResult(Message):
    """An element of `UpdateFeaturesResponse.results`."""

    feature: str
    error_code: int = 0
    error_message: str | None = None


class UpdateFeaturesResponse(KafkaResponse):
    """UpdateFeatures (57), versions 0 to 2."""

    error_code: int = 0
    error_message: str | None = None
    results: Sequence[UpdatableFeatureResult] = ()  # v0 to v1
    throttle_time_ms: int = 0


class DescribeQuorumRequestPartition(Message):
    """An element of `DescribeQuorumRequestTopic.partitions`."""

    partition_index: int


class DescribeQuorumRequestTopic(Message):
    """An element of `DescribeQuorumRequest.topics`."""

    topic_name: str
    partitions: tuple[DescribeQuorumRequestPartition, ...]


class DescribeQuorumRequest(KafkaRequest):
    """DescribeQuorum (55), versions 0 to 2."""

    API_KEY: ClassVar[int] = 55

    topics: tuple[DescribeQuorumRequestTopic, ...]


class QuorumVoter(Message):
    """An element of `DescribeQuorumPartition.current_voters`."""

    replica_id: int
    log_end_offset: int
    last_fetch_timestamp: int = -1  # v1+
    last_caught_up_timestamp: int = -1  # v1+
    replica_directory_id: uuid.UUID | None = None  # v2+


class DescribeQuorumPartition(Message):
    """An element of `DescribeQuorumTopic.partitions`."""

    partition_index: int
    error_code: int
    leader_id: int
    leader_epoch: int
    high_watermark: int
    current_voters: Sequence[QuorumVoter]
    observers: tuple[()] = ()
    error_message: str | None = None  # v2+


class DescribeQuorumTopic(Message):
    """An element of `DescribeQuorumResponse.topics`."""

    topic_name: str
    partitions: Sequence[DescribeQuorumPartition]


class QuorumListener(Message):
    """An element of `QuorumNode.listeners`."""

    name: str
    host: str
    port: int


class QuorumNode(Message):
    """An element of `DescribeQuorumResponse.nodes`."""

    node_id: int
    listeners: Sequence[QuorumListener]


class DescribeQuorumResponse(KafkaResponse):
    """DescribeQuorum (55), versions 0 to 2."""

    error_code: int
    topics: Sequence[DescribeQuorumTopic]
    error_message: str | None = None  # v2+
    nodes: Sequence[QuorumNode] = ()  # v2+


class DescribeClusterRequest(KafkaRequest):
    """DescribeCluster (60), versions 0 to 2."""

    API_KEY: ClassVar[int] = 60

    include_cluster_authorized_operations: bool
    endpoint_type: int = 1  # v1+
    include_fenced_brokers: bool = False  # v2+


class DescribeClusterBroker(Message):
    """An element of `DescribeClusterResponse.brokers`."""

    broker_id: int
    host: str
    port: int
    rack: str | None
    is_fenced: bool = False  # v2+


class DescribeClusterResponse(KafkaResponse):
    """DescribeCluster (60), versions 0 to 2."""

    error_code: int
    error_message: str | None
    cluster_id: str
    controller_id: int
    brokers: Sequence[DescribeClusterBroker]
    cluster_authorized_operations: int
    endpoint_type: int = 1  # v1+
    throttle_time_ms: int = 0


class DescribeAclsRequest(KafkaRequest):
    """DescribeAcls (29), versions 1 to 3."""

    API_KEY: ClassVar[int] = 29


class DescribeAclsResponse(KafkaResponse):
    """DescribeAcls (29), versions 1 to 3."""

    error_code: int
    error_message: str | None
    resources: tuple[()] = ()
    throttle_time_ms: int = 0


class AclCreation(Message):
    """An element of `CreateAclsRequest.creations`; its fields are ignored."""


class CreateAclsRequest(KafkaRequest):
    """CreateAcls (30), versions 1 to 3."""

    API_KEY: ClassVar[int] = 30

    creations: tuple[AclCreation, ...]


class AclCreationResult(Message):
    """An element of `CreateAclsResponse.results`."""

    error_code: int
    error_message: str | None


class CreateAclsResponse(KafkaResponse):
    """CreateAcls (30), versions 1 to 3."""

    results: Sequence[AclCreationResult]
    throttle_time_ms: int = 0


class DeleteAclsFilter(Message):
    """An element of `DeleteAclsRequest.filters`; its fields are ignored."""


class DeleteAclsRequest(KafkaRequest):
    """DeleteAcls (31), versions 1 to 3."""

    API_KEY: ClassVar[int] = 31

    filters: tuple[DeleteAclsFilter, ...]


class DeleteAclsFilterResult(Message):
    """An element of `DeleteAclsResponse.filter_results`."""

    error_code: int
    error_message: str | None
    matching_acls: tuple[()] = ()


class DeleteAclsResponse(KafkaResponse):
    """DeleteAcls (31), versions 1 to 3."""

    filter_results: Sequence[DeleteAclsFilterResult]
    throttle_time_ms: int = 0


class DescribeClientQuotasRequest(KafkaRequest):
    """DescribeClientQuotas (48), versions 0 to 1."""

    API_KEY: ClassVar[int] = 48


class DescribeClientQuotasResponse(KafkaResponse):
    """DescribeClientQuotas (48), versions 0 to 1."""

    error_code: int
    error_message: str | None
    entries: tuple[()] = ()
    throttle_time_ms: int = 0


class UnregisterBrokerRequest(KafkaRequest):
    """UnregisterBroker (64), version 0."""

    API_KEY: ClassVar[int] = 64

    broker_id: int


class UnregisterBrokerResponse(KafkaResponse):
    """UnregisterBroker (64), version 0."""

    error_code: int = 0
    error_message: str | None = None
    throttle_time_ms: int = 0
