"""The dependencies of a `Storage`: the data of its replica set, local metadata of streams, and event callbacks.

Entry: `ReplicaSetData`, `HandedWal`, `LocalStreams`, `StorageEvents`, `bucket_reader`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.runtime.clock import Clock
from tidelog.runtime.types import Offload
from tidelog.storage.ack_gate import AckGate
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.cache.log_cache import LogCache
from tidelog.storage.cache.recovered import RecoveredRecords
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.managers import ObjectManager
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.reads.throttle import ColdThrottle
from tidelog.storage.settings import CacheSettings
from tidelog.storage.wal.base import Wal


def no_facts(_stream_id: int) -> tuple[int, int] | None:
    """Default `facts`: no stream is known."""
    return None


def ignore_error(_error: Exception) -> None:
    """Default callback: do nothing."""


def takes_every_write(_min_in_sync: int) -> None:
    """Default `check`: no replica is missing."""


def ignore_quarantine(_stream_id: int, _reason: str) -> None:
    """Default callback: do nothing."""


@dataclass(frozen=True, slots=True)
class HandedWal:
    """A WAL whose replica leads a set of several: its epoch has begun, and the replica has its callbacks.

    The replica confirms, and closes the WAL; `Storage.recover` is not called.
    """

    records: RecoveredRecords
    """What the WAL holds beyond the bucket, its unconfirmed tail included. The storage takes them over."""
    cache: LogCache
    """In which they are charged; the storage's from now on."""
    confirm: ConfirmOffset
    """The master's. It fails when the term ends."""
    gate: AckGate = field(default_factory=AckGate)
    """The master's, which nothing passes while it is closed."""
    check: Callable[[int], None] = takes_every_write
    """Raises if fewer replicas than this are in sync, or the master takes no writes (`ReplicaMaster.check_writable`).
    """
    durable: ConfirmOffset | None = None
    """WAL offset up to which the master's own disk has everything (`ReplicaMaster.durable`); None: use `confirm`."""


@dataclass(frozen=True, slots=True)
class ReplicaSetData:
    """The stores of one replica set's data, and the interface to the metadata of its objects."""

    cluster_id: str
    replica_set_id: int
    wal: Wal
    store: ObjectStore
    objects: ObjectManager
    single_member: bool = True
    """Whether the WAL's durable offset is the confirm offset."""
    handed: HandedWal | None = None
    """None: the storage recovers the WAL, enters its epoch, and closes it."""
    reader: BlockReader | None = None
    """Reads from the bucket for all storages of a process, whose owner closes it. None: the storage makes its own."""

    @property
    def check_writable(self) -> Callable[[int], None]:
        """Return what refuses writes that too few replicas would get."""
        return self.handed.check if self.handed is not None else takes_every_write


@dataclass(frozen=True, slots=True)
class LocalStreams:
    """Local metadata of streams."""

    owns: Callable[[int], bool] | None = None
    """Whether a stream exists and is placed on this replica set. None: unknown, so every stream is uploaded
    and uploads wait for none."""
    facts: Callable[[int], tuple[int, int] | None] = no_facts
    """Committed end and owner-since epoch of a stream that this replica set has open, or None."""


class FinishedUpload(NamedTuple):
    """An upload that has ended. Times are monotonic seconds."""

    replica_set: int
    wal_start: int
    wal_end: int
    first_object: int
    """-1: there is none."""
    objects: int
    """Number of its objects, with consecutive ids."""
    size_bytes: int
    """Of the objects."""
    began: float
    put_at: float
    """When its objects were in the bucket; 0: they never were."""
    ended: float
    error: str
    """Why uploads have stopped with it; empty: it is committed."""


@dataclass(frozen=True, slots=True)
class StorageEvents:
    """Callbacks for events that end the service of a replica set or of a stream."""

    fenced: Callable[[Exception], None] = ignore_error
    """Called once, with the reason why uploads and appends have stopped permanently."""
    wal_failed: Callable[[Exception], None] = ignore_error
    """Called once when the disk failed: nothing more is acknowledged; confirmed data is still uploaded."""
    quarantined: Callable[[int, str], None] = ignore_quarantine
    """Called with a stream id and the reason of its quarantine."""
    uploaded: Callable[[FinishedUpload], None] | None = None
    """Called with each upload that has ended, for traces."""


UNKNOWN_STREAMS = LocalStreams()
NO_LISTENERS = StorageEvents()


def bucket_reader(
    cluster_id: str,
    store: ObjectStore,
    objects: ObjectManager,
    cache: CacheSettings,
    clock: Clock,
    *,
    throttle: ColdThrottle | None = None,
    offload: Offload = asyncio.to_thread,
) -> BlockReader:
    """Return a reader of a cluster's bucket, with a block cache of its own."""
    return BlockReader(
        store=store,
        objects=objects,
        clock=clock,
        cluster_id=cluster_id,
        cache_bytes=cache.block_bytes,
        in_flight_bytes=cache.cold_in_flight_bytes,
        offload=offload,
        throttle=throttle,
    )
