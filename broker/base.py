"""The state of a broker that knows its cluster, before its components are created.

Entry: `BrokerBase`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidelog.broker.bucket_probe import BucketProbe
from tidelog.broker.failure import BrokerFailure
from tidelog.broker.inputs import BrokerIdentity, BrokerSettings, BrokerWorld, ControllerAccess, WalAccess
from tidelog.broker.telemetry.health import HealthMonitor
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.image.image import Image

if TYPE_CHECKING:
    from tidelog.broker.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class BrokerBase:
    """The inputs of a broker, and the results of the first stage of its start."""

    identity: BrokerIdentity
    settings: BrokerSettings
    controllers: ControllerAccess
    wal: WalAccess
    world: BrokerWorld
    controller: ControllerClient
    """Connected, with an image."""
    failure: BrokerFailure
    probe: BucketProbe
    registry: PartRegistry
    health: HealthMonitor
    ask_restart: Callable[[], None]
    """Sets `BrokerNode.restart_asked`."""
    tracing: Tracing | None = None
    """None: nothing is traced."""

    @property
    def broker_id(self) -> int:
        """Also the id of its replica set."""
        return self.identity.broker_id

    def image(self) -> Image:
        """The local copy of the metadata."""
        return self.controller.image
