"""Messages of client telemetry (KIP-714): which metrics a client is to send, and what it sends."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import ClassVar

from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse


class GetTelemetrySubscriptionsRequest(KafkaRequest):
    """GetTelemetrySubscriptions (71), version 0."""

    API_KEY: ClassVar[int] = 71

    client_instance_id: uuid.UUID | None
    """None in the first request of a client."""


class GetTelemetrySubscriptionsResponse(KafkaResponse):
    """The response to `GetTelemetrySubscriptionsRequest`."""

    throttle_time_ms: int = 0
    error_code: int = 0
    client_instance_id: uuid.UUID | None = None
    subscription_id: int = 0
    accepted_compression_types: Sequence[int] = ()
    push_interval_ms: int = 0
    telemetry_max_bytes: int = 0
    delta_temporality: bool = False
    requested_metrics: Sequence[str] = ()


class PushTelemetryRequest(KafkaRequest):
    """PushTelemetry (72), version 0."""

    API_KEY: ClassVar[int] = 72

    client_instance_id: uuid.UUID | None
    subscription_id: int
    terminating: bool
    compression_type: int
    metrics: bytes
    """`MetricsData` of OpenTelemetry's protocol."""


class PushTelemetryResponse(KafkaResponse):
    """The response to `PushTelemetryRequest`."""

    throttle_time_ms: int = 0
    error_code: int = 0
