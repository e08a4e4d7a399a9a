"""The inputs of a broker: its identity, its settings, and the interfaces to its WAL, the controllers and the system.

Entry: `BrokerIdentity`, `BrokerSettings`, `BrokerWorld`, `ControllerAccess`, `WalAccess`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tidelog.broker.partitions.takeover import OpenWal
from tidelog.broker.settings import (
    AdminSettings,
    GroupSettings,
    KafkaSettings,
    LogSettings,
    ReplicationSettings,
    TracingSettings,
)
from tidelog.broker.telemetry.disk_space import DiskSpace
from tidelog.controller.image.feed import DeltaFeed
from tidelog.controller.rpc.handshake import Credentials
from tidelog.controller.rpc.tls_network import TlsNetwork
from tidelog.runtime.clock import Clock
from tidelog.runtime.cpu_time import CpuMeter, SystemCpu
from tidelog.runtime.disk import Disk
from tidelog.runtime.facts.node import OwnFacts
from tidelog.runtime.network import Network
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.settings import CacheSettings, CleanSettings, CompactionSettings, StorageSettings, UploadSettings
from tidelog.storage.wal.base import ReplicatedWal, Wal


def never() -> bool:
    """Default of `searches_orphans`: this process has no periodic orphan search."""
    return False


def no_state() -> dict[str, Any] | None:
    """Default of `bucket_state`: no controller in this process writes metadata to the bucket."""
    return None


def do_nothing() -> None:
    """Default of `forget_accepted_loss`: there is no acceptance."""


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The identity of this broker, from its data directory."""

    broker_id: int
    check_code: str
    first_start: bool
    """Whether the directory has not belonged to a cluster before."""
    bind: Callable[[str], None]
    """Binds the data directory to a cluster id; raises if it belongs to another."""
    directory: str = ""
    """Identifies the directory and the machine: a copy has another value."""
    patience_s: float = 0.0
    """How long a start waits for the end of a process with another copy, which may be dead and still registered."""
    own: OwnFacts = field(default_factory=OwnFacts)
    """What it tells of its process when an operator asks."""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The sections of the configuration that a broker reads."""

    kafka: KafkaSettings
    admin: AdminSettings
    log: LogSettings
    group: GroupSettings
    upload: UploadSettings
    cache: CacheSettings
    compaction: CompactionSettings
    clean: CleanSettings
    roles: Sequence[str]
    flat: Callable[[], dict[str, str]]
    """The effective configuration by dotted key, secrets hidden."""
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)

    @property
    def storage(self) -> StorageSettings:
        """The sections that its storage reads."""
        return StorageSettings(self.upload, self.cache)


@dataclass(frozen=True, slots=True)
class BrokerWorld:
    """The interfaces to everything outside the process."""

    network: Network
    clock: Clock
    rng: random.Random
    store: GuardedObjectStore
    cpu: CpuMeter = field(default_factory=SystemCpu)
    tls: TlsNetwork | None = None
    """The network between brokers, if it has TLS."""

    disk_space: Callable[[], Awaitable[DiskSpace]] | None = None
    """Measures the file system of the data directory. Raises `OSError`."""

    @property
    def between_brokers(self) -> Network:
        """The network on which brokers listen for each other, and connect to each other."""
        return self.tls if self.tls is not None else self.network


@dataclass(frozen=True, slots=True)
class ControllerAccess:
    """How the broker connects to the controllers."""

    endpoints: list[tuple[str, int]]
    heartbeat_interval_s: float
    credentials: Credentials | None = None
    """None: neither controllers nor other brokers require any."""
    follows_controllers: bool = True
    """Whether the controllers' addresses are taken from the metadata from now on; else from `endpoints`."""
    local: DeltaFeed | None = None
    """The feed of the cluster's only controller, if it runs in this process."""
    searches_orphans: Callable[[], bool] = never
    """Whether this process currently runs the periodic orphan search."""
    bucket_state: Callable[[], dict[str, Any] | None] = no_state
    """`ControllerNode.bucket_state` of the controller in this process."""


class OpenedReplicaWal(NamedTuple):
    """The WAL of one replica, before its recovery, and what closes the disk under it."""

    wal: ReplicatedWal
    disk: Disk


class ReplicaDisks(Protocol):
    """The replicated WALs in a broker's data directory."""

    def open(self, replica_set_id: int) -> OpenedReplicaWal:
        """Open the WAL of a replica set; an empty one if there is none. Close it, and its disk, before the next call.

        Raises `StorageFailed`.
        """
        ...

    def kept(self) -> list[int]:
        """Return the replica sets of other brokers of which there are files. Raises `StorageFailed`."""
        ...

    async def remove(self, replica_set_id: int) -> None:
        """Delete the files of a replica set of another broker, after they were closed. Raises `StorageFailed`."""
        ...

    async def set_aside(self, replica_set_id: int) -> str:
        """Keep the files of a replica set, which were closed, where `open` does not find them; return where.

        Nothing that was kept before is overwritten, and no more than a few are kept. Raises `StorageFailed`.
        """
        ...

    async def rejected(self) -> list[str]:
        """Return where files are that were set aside. Raises `StorageFailed`."""
        ...

    async def keeps_earlier(self, replica_set_id: int) -> bool:
        """Return whether a replica has kept files that it had before it started over. Raises `StorageFailed`."""
        ...


@dataclass(frozen=True, slots=True)
class WalAccess:
    """How write-ahead logs are opened."""

    kind: str
    """`wal.kind`: `disk`, `s3` or `memory`."""
    open: Callable[[str], Wal]
    """Opens this broker's WAL in the cluster with this id."""
    open_in_bucket: OpenWal
    """Opens another broker's WAL in the bucket."""
    place: str = ""
    """The bucket that the WAL is committed to, as text; empty: not told to the controllers."""
    may_lose_tail: bool = False
    """Whether a power loss may take acknowledged records (`wal.flush = "async"`)."""
    directory: str = ""
    """The data directory, for messages."""
    accepted_loss: str = ""
    """The loss that an operator has accepted (`tidelog wal accept-loss`); empty: none."""
    forget_accepted_loss: Callable[[], None] = do_nothing
    """Called when the broker has a WAL that continues: an acceptance is used only once."""
    replicas: ReplicaDisks | None = None
    """The disks of replicated WALs, that of the broker's own replica set included. None: it keeps no replicas."""
    max_record_bytes: int = 128 << 20
    """`wal.max_record_bytes`."""

    @property
    def is_in_bucket(self) -> bool:
        """Return whether this broker's WAL is in the bucket; then the start needs a bucket that can fence."""
        return self.kind == "s3"
