"""Sections `[kafka]`, `[admin]`, `[log]`, `[group]` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MIB = 1 << 20

Port = Annotated[int, Meta(ge=0, le=65_535)]
Positive = Annotated[int, Meta(ge=1)]


class KafkaSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[kafka]`: the Kafka listener and its limits."""

    host: str = "127.0.0.1"
    port: Port = 9092
    advertised_host: str = ""
    """What clients are told; empty: `host`."""
    advertised_port: Port = 0
    """What clients are told; 0: `port`."""
    rack: str = ""
    max_request_bytes: Annotated[int, Meta(ge=1024, le=(1 << 31) - 1)] = 100 * MIB
    """A larger frame closes the connection before memory is spent (Kafka: socket.request.max.bytes)."""
    max_connections: Positive = 4096
    max_in_flight_bytes: Annotated[int, Meta(ge=MIB)] = 512 * MIB
    """Bytes of requests being handled; at the bound the broker stops reading from sockets."""
    idle_timeout_ms: Positive = 600_000
    """A connection without a request for so long is closed (Kafka: connections.max.idle.ms)."""
    auto_create_topics: bool = True
    num_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 4
    """Partitions of a topic created without a number."""
    message_max_bytes: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 1_048_588
    """Largest record batch (Kafka: message.max.bytes); a topic's max.message.bytes overrides it."""
    fetch_max_bytes: Annotated[int, Meta(ge=1024, le=(1 << 31) - 1)] = 55 * MIB
    """Largest Fetch response, whatever the client asks (Kafka: fetch.max.bytes)."""


class AdminSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[admin]`: the admin HTTP listener."""

    host: str = "127.0.0.1"
    port: Port = 0
    """0 chooses a free one; clients find it through DescribeConfigs of the broker (`tidelog.admin.url`)."""


class LogSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[log]`: defaults of topics, named as Kafka's own."""

    retention_ms: Annotated[int, Meta(ge=-1)] = 604_800_000
    retention_bytes: Annotated[int, Meta(ge=-1)] = -1
    segment_bytes: Annotated[int, Meta(ge=14)] = 1 << 30
    segment_ms: Positive = 604_800_000
    retention_check_interval_ms: Positive = 300_000
    producer_id_expiration_ms: Positive = 86_400_000
    timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"


class GroupSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[group]`: consumer groups, named as Kafka's own."""

    min_session_timeout_ms: Positive = 6_000
    max_session_timeout_ms: Positive = 1_800_000
    initial_rebalance_delay_ms: Annotated[int, Meta(ge=0)] = 3_000
    max_size: Positive = 2_147_483_647
    offsets_topic_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 16
    """Partitions of `__consumer_offsets`; fixed when the topic is created (Kafka's default is 50)."""
    offsets_retention_ms: Positive = 604_800_000
    offsets_check_interval_ms: Positive = 600_000
    offset_metadata_max_bytes: Annotated[int, Meta(ge=0)] = 4096
