"""What the replicas of a broker get from outside: identities, settings, interfaces and callbacks.

Entry: `ReplicaIdentity`, `MasterTarget`, `SetAuthority`, `ReplicationWorld`, `ReplicaEvents`, `ReplicationLimits`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, Unavailable
from tidelog.runtime.network import Network
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.sending import LinkSettings


class NotEnoughReplicas(Unavailable):
    """Too few replicas are in sync: nothing was appended. Kafka: NOT_ENOUGH_REPLICAS (19)."""

    kafka_code = 19


class AlterRefused(InvalidInput):
    """The controllers have refused a configuration for good: no request for it can take effect any more."""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Which copy of which WAL this is."""

    replica_set_id: int
    """int32."""
    replica: WalReplica
    registration_epoch: int
    """That of the broker's registration (int64)."""
    learner: bool = False
    """Receives, and is never counted."""


class MasterTarget(NamedTuple):
    """The master to follow, as the metadata names it."""

    epoch: int
    """The set's master epoch (int32)."""
    broker_id: int
    host: str
    port: int


class SetAuthority(Protocol):
    """What the controllers decide for one replica set."""

    async def alter(
        self, wanted: SetConfiguration, *, master_epoch: int, ends: Mapping[WalReplica, int], confirm_offset: int
    ) -> SetConfiguration:
        """Ask for a configuration, as the master of an epoch; return the one that is in force then.

        `wanted.number` is that of the configuration it follows; if it takes effect, it gets the next one. Asked twice
        it takes effect once. `ends`: the WAL offset (int64 bytes) up to which each replica has the master's bytes
        durably, as far as it is known; `confirm_offset`: the master's. With these the controllers recognise a disk that
        was lost or rolled back. Raises `Fenced` if another master or epoch is in force, `AlterRefused` if neither this
        request nor an earlier one for `wanted` can take effect any more, `Unavailable` if the outcome is not known.

        Asked for the configuration that is in force they learn the ends, and change nothing.
        """
        ...

    async def resign(self, designated: int, reason: str, *, master_epoch: int) -> None:
        """End the term of that epoch by an election that designates another broker, and does not wait for this one.

        `designated`: `NO_BROKER` where it is not known who is in sync. Asked twice it takes effect once. Raises
        `Fenced` if another master or epoch is in force, `NotEligible` if the designated broker may not lead,
        `Unavailable` if the outcome is not known.
        """
        ...

    def reports_every_s(self) -> float:
        """Return how often (seconds) a master tells where WALs end, if they have moved: each time a command."""
        ...

    def admits(self, replica: WalReplica, registration_epoch: int, *, learner: bool) -> bool:
        """Return whether a replica may follow: its broker joined with this WAL, and is registered under this epoch."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicationLimits:
    """Bounds and intervals that are not a link's own."""

    link: LinkSettings = field(default_factory=LinkSettings)
    live_bytes: int = 16 << 20
    """Newest bytes of a WAL that its master keeps for sending while it has followers."""
    inbox_bytes: int = 4 << 20
    """Received and not written yet; beyond it nothing more is read from the connection."""
    max_record_bytes: int = 128 << 20
    """`wal.max_record_bytes`: a received batch may be as long as one record."""
    tick_s: float = 0.25
    """How often time-outs and memberships are looked at."""
    tells_ends: bool = True
    """Whether the controllers are told where the members' WALs end while several disks decide, too. Not where a loss of
    power may take what was acknowledged (`wal.flush = "async"`): a disk that forgot it would be refused."""
    hung_disk_s: float = 10.0
    """A master whose disk completes nothing for so long, while something waits for it, lets another replica lead; so
    does one that was elected and cannot begin its term."""
    connect_timeout_s: float = 5.0
    """For a connection with its handshake, and for a master's answer to HELLO."""
    retry_base_s: float = 0.02
    retry_cap_s: float = 2.0
    """Back-off of a follower that connects, and of a master that asks the controllers, anew."""


@dataclass(frozen=True, slots=True)
class ReplicationWorld:
    """The interfaces to everything outside the process."""

    network: Network
    clock: Clock
    rng: random.Random
    credentials: Credentials
    """The cluster's secret, and this broker's id. Replication does without neither."""


def _ignore(_argument: object) -> None:
    """Default callback: do nothing."""


def _ignore_range(_start: int, _end: int) -> None:
    """Default callback: do nothing."""


def _ignore_change() -> None:
    """Default callback: do nothing."""


def _never() -> bool:
    """Default callback: nothing was given up."""
    return False


@dataclass(frozen=True, slots=True)
class ReplicaEvents:
    """Callbacks of one replica. They run on the event loop, must be quick, and must not raise."""

    confirmed: Callable[[int], None] = _ignore
    """The master's confirm offset (int64 bytes) has moved to this one."""
    deposed: Callable[[int], None] = _ignore
    """Somebody has shown the master that there is this newer epoch: it confirms no more. -1: the controllers have."""
    diverged: Callable[[Exception], None] = _ignore
    """The follower's WAL and its master's contradict each other: it has stopped, and an operator must look."""
    wal_failed: Callable[[Exception], None] = _ignore
    """The WAL has failed for good; the replica has stopped."""
    readable: Callable[[int, int], None] = _ignore_range
    """The follower has the records between these WAL offsets (int64 bytes), and knows that they are confirmed."""
    following: Callable[[], None] = _ignore_change
    """The follower's WAL is a prefix of its master's now, or the connection has ended."""
    has_given_up: Callable[[], bool] = _never
    """Asked before the WAL is cut or starts over: may it have records that an operator gave up? It is kept then."""
