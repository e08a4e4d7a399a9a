"""What a controller is started with: which one it is, its settings, and what it reaches the world through.

Entry: `ControllerIdentity`, `ControllerSections`, `ControllerWorld`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from tidelog.controller.active.lifecycle import DeleteObjects
from tidelog.controller.image.feed import DEFAULT_LIMITS, FeedLimits
from tidelog.controller.model.commands import PARTITIONS_PER_DELETION
from tidelog.controller.model.settings import BalancerSettings, ControllerSettings, ScaleSettings
from tidelog.controller.raft.consensus import Consensus
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import Clock
from tidelog.runtime.facts.node import OwnFacts
from tidelog.runtime.network import Network
from tidelog.storage.bucket.proof import BucketProof
from tidelog.storage.bucket.store import ObjectStore


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
    own: OwnFacts = field(default_factory=OwnFacts)
    """What it tells of its process when an operator asks."""


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


@dataclass(frozen=True, slots=True)
class ControllerWorld:
    """What a controller reaches the world through."""

    network: Network
    clock: Clock
    rng: random.Random
    delete_objects: DeleteObjects | None = None
    """Deletes destroyed objects from the bucket. None: they stay there and in the metadata."""
    state_store: ObjectStore | None = None
    """The bucket that the metadata is written to. None: it is not."""
    bucket_proof: BucketProof | None = None
    """What shows that this bucket is the cluster's. None: it is taken for it."""
    consensus: Consensus | None = None
    """The replicated log. None: Raft in the controller's directory."""
