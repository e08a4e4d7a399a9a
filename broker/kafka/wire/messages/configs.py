"""Messages about configs: DescribeConfigs, AlterConfigs, IncrementalAlterConfigs, ListConfigResources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse, Message


class DescribeConfigsResource(Message):
    """An element of `DescribeConfigsRequest.resources`."""

    resource_type: int
    resource_name: str
    configuration_keys: tuple[str, ...] | None


class DescribeConfigsRequest(KafkaRequest):
    """DescribeConfigs (32), versions 1 to 4."""

    API_KEY: ClassVar[int] = 32

    resources: tuple[DescribeConfigsResource, ...]
    include_synonyms: bool
    include_documentation: bool = False  # v3+


class DescribeConfigsSynonym(Message):
    """An element of `DescribeConfigsResourceResult.synonyms`."""

    name: str
    value: str | None
    source: int


class DescribeConfigsResourceResult(Message):
    """An element of `DescribeConfigsResult.configs`."""

    name: str
    value: str | None
    read_only: bool
    config_source: int
    is_sensitive: bool
    synonyms: Sequence[DescribeConfigsSynonym]
    config_type: int = 0  # v3+
    documentation: str | None = None  # v3+


class DescribeConfigsResult(Message):
    """An element of `DescribeConfigsResponse.results`."""

    error_code: int
    error_message: str | None
    resource_type: int
    resource_name: str
    configs: Sequence[DescribeConfigsResourceResult]


class DescribeConfigsResponse(KafkaResponse):
    """DescribeConfigs (32), versions 1 to 4."""

    results: Sequence[DescribeConfigsResult]
    throttle_time_ms: int = 0


class AlterableConfig(Message):
    """An element of `AlterConfigsResource.configs`."""

    name: str
    value: str | None


class AlterConfigsResource(Message):
    """An element of `AlterConfigsRequest.resources`."""

    resource_type: int
    resource_name: str
    configs: tuple[AlterableConfig, ...]


class AlterConfigsRequest(KafkaRequest):
    """AlterConfigs (33), versions 0 to 2."""

    API_KEY: ClassVar[int] = 33

    resources: tuple[AlterConfigsResource, ...]
    validate_only: bool


class AlterConfigsResourceResponse(Message):
    """An element of `AlterConfigsResponse.responses`."""

    error_code: int
    error_message: str | None
    resource_type: int
    resource_name: str


class AlterConfigsResponse(KafkaResponse):
    """AlterConfigs (33), versions 0 to 2."""

    responses: Sequence[AlterConfigsResourceResponse]
    throttle_time_ms: int = 0


class IncrementalAlterableConfig(Message):
    """An element of `IncrementalAlterConfigsResource.configs`."""

    name: str
    config_operation: int
    value: str | None


class IncrementalAlterConfigsResource(Message):
    """An element of `IncrementalAlterConfigsRequest.resources`."""

    resource_type: int
    resource_name: str
    configs: tuple[IncrementalAlterableConfig, ...]


class IncrementalAlterConfigsRequest(KafkaRequest):
    """IncrementalAlterConfigs (44), versions 0 to 1."""

    API_KEY: ClassVar[int] = 44

    resources: tuple[IncrementalAlterConfigsResource, ...]
    validate_only: bool


class IncrementalAlterConfigsResponse(KafkaResponse):
    """IncrementalAlterConfigs (44), versions 0 to 1."""

    responses: Sequence[AlterConfigsResourceResponse]
    throttle_time_ms: int = 0


class ListConfigResourcesRequest(KafkaRequest):
    """ListConfigResources (74), versions 0 to 1."""

    API_KEY: ClassVar[int] = 74

    resource_types: tuple[int, ...] = ()  # v1+


class ListedConfigResource(Message):
    """An element of `ListConfigResourcesResponse.config_resources`."""

    resource_name: str
    resource_type: int = 16  # v1+


class ListConfigResourcesResponse(KafkaResponse):
    """ListConfigResources (74), versions 0 to 1."""

    error_code: int
    config_resources: Sequence[ListedConfigResource]
    throttle_time_ms: int = 0
