"""What a handler may use: the parts of a broker, by name, and the shape of a handler.

`Services` is built once by `broker.node` and passed to every handler inside a `RequestContext`. Handlers hold no state
of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from broker.settings import GroupSettings, KafkaSettings, LogSettings
from runtime.clock import Clock
from runtime.deadlines import Deadlines

if TYPE_CHECKING:
    from broker.groups.coordinator import GroupCoordinator
    from broker.metrics import Metrics
    from broker.partitions import PartitionManager
    from broker.producer_ids import ProducerIds
    from controller.client import ControllerClient


@dataclass(slots=True)
class Services:
    """The parts of one running broker."""

    node_id: int
    clock: Clock
    kafka: KafkaSettings
    log: LogSettings
    group: GroupSettings
    controller: ControllerClient
    """Commands, and `controller.image`, the local copy of the metadata."""
    partitions: PartitionManager
    """The partition logs that this broker leads now."""
    groups: GroupCoordinator
    producer_ids: ProducerIds
    metrics: Metrics
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Time-outs of requests."""
    broker_configs: Callable[[], dict[str, str]] = dict
    """This broker's effective configuration for DescribeConfigs, by dotted key (`kafka.port`, `wal.flush`, …)."""


@dataclass(slots=True)
class RequestContext:
    """One request: its header and where it came from."""

    services: Services
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    client_host: str
    extra: dict[str, Any] = field(default_factory=dict)
    """Per-connection facts (client software name and version)."""


Handle = Callable[[RequestContext, Any], Awaitable[Any]]
"""Takes the decoded request, returns the response to encode; None means no reply (Produce with acks=0)."""


@dataclass(frozen=True, slots=True)
class ApiHandler:
    """One API key with the version range this broker serves."""

    api_key: int
    min_version: int
    max_version: int
    handle: Handle
    advertised_min: int | None = None
    """What ApiVersions says, where it differs from what is served (KAFKA-18659: Produce says 0)."""
