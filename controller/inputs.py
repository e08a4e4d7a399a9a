"""What a controller is started with: which one it is, and its settings.

Entry: `ControllerIdentity`, `ControllerSections`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tidelog.controller.image.feed import DEFAULT_LIMITS, FeedLimits
from tidelog.controller.model.commands import PARTITIONS_PER_DELETION
from tidelog.controller.model.settings import BalancerSettings, ControllerSettings, ScaleSettings
from tidelog.controller.rpc.handshake import Credentials


@dataclass(frozen=True, slots=True)
class ControllerIdentity:
    """Which controller this is, and how it shows that."""

    node_id: int
    directory: Path | None
    """Holds journal, snapshot and the address file; only one process may use it. None is for a consensus that keeps its
    own."""
    credentials: Credentials | None = None
    serves_broker: bool = False
    """Whether a broker of this process will use the image through `ControllerNode.feed`."""


@dataclass(frozen=True, slots=True)
class ControllerSections:
    """The sections of the configuration that a controller reads."""

    controller: ControllerSettings
    balancer: BalancerSettings = field(default_factory=BalancerSettings)
    scale: ScaleSettings = field(default_factory=ScaleSettings)
    delete_delay_ms: int = 60_000
    """`upload.delete_delay_ms`: how long an object is kept after the metadata has stopped naming it."""
    partitions_per_deletion: int = PARTITIONS_PER_DELETION
    """Partitions of a deleted topic that one command removes. Not configurable; simulated clusters have 1."""
    feed: FeedLimits = DEFAULT_LIMITS
    """Not configurable; simulated clusters have small limits."""
