"""The interface of the write-ahead log of one replica set.

A WAL is a sequence of records addressed by byte offset (int64): the same bytes at the same offsets on every member. The
records of all streams of the replica set are interleaved in it. It is appended at `end_offset`, durable up to
`durable_offset`, confirmed (the quorum rule met) up to the confirm offset that its owner passes to it, and trimmed at
the front.

Invariants: start ≤ durable ≤ end; a record is never split over files; records that `append` accepted
become durable in order, or the WAL fails as a whole (`StorageFailed`), after which nothing more is acknowledged.

Backends: `tidelog.storage.wal.disk.wal`, `tidelog.storage.wal.s3.wal`, `tidelog.storage.wal.memory`; their common part
is `tidelog.storage.wal.state`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from tidelog.runtime.errors import Overloaded, StorageFailed
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.epochs import EpochHistory


class WalRecordType(IntEnum):
    """The type of a WAL record (uint8)."""

    DATA = 1
    """A batch of one stream."""
    EPOCH_START = 2
    """The first bytes of a master's epoch; no payload (docs/protocols.md, Epoch history)."""


class WalFull(Overloaded):
    """The WAL has reached its size limit or the disk is full: retry. Kafka: KAFKA_STORAGE_ERROR (56), retriable."""

    kafka_code = 56


class WalFailed(StorageFailed):
    """The disk under the WAL failed (e.g. an fsync error): this process must not use the WAL any more."""


@dataclass(frozen=True, slots=True)
class WalRecord:
    """One record as read back. `payload` is a view that remains valid as long as it is referenced."""

    offset: int
    """WAL byte offset of the record's first byte."""
    end_offset: int
    type: WalRecordType
    master_epoch: int
    """int32, ≥ 0."""
    stream_id: int
    stream_epoch: int
    base_offset: int
    """First stream offset in the payload."""
    count: int
    """Number of stream offsets that the payload covers (≥ 1 for DATA)."""
    payload: memoryview


class Wal(Protocol):
    """A write-ahead log. All methods are called on the event loop's thread."""

    @property
    def start_offset(self) -> int:
        """Return the offset of the first byte kept."""
        ...

    @property
    def end_offset(self) -> int:
        """Return the offset after the last byte appended."""
        ...

    @property
    def durable_offset(self) -> int:
        """Return the offset after the last byte known to be durable."""
        ...

    @property
    def synced_offset(self) -> int:
        """Return the offset up to which a power loss takes nothing; below durable only with `flush = "async"`."""
        ...

    @property
    def master_epoch(self) -> int:
        """Return the epoch in which records are appended; -1 before `begin_epoch`."""
        ...

    @property
    def epoch_history(self) -> EpochHistory:
        """Return the epochs of this log; the caller must not modify them."""
        ...

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """Scan from start to end, truncate a torn tail durably, call `on_record` for each whole record in order.

        Returns the confirm offset that the records prove (the largest one written in a header). Called once, before
        any other method. Raises `CorruptData` when bytes that were durable fail their check (not a torn tail).
        """
        ...

    async def reset(self, offset: int, kept_as: str = "") -> None:
        """Restart the log, empty, at WAL offset `offset`; between `recover` and `begin_epoch` (docs/protocols.md).

        With `kept_as`, a suffix, the files of a log on disk are renamed and kept, not removed.
        """
        ...

    async def writable(self, payload_bytes: int = 0) -> None:
        """Wait until an append of `payload_bytes` would not raise `WalFull`. Raises `WalFailed`."""
        ...

    async def begin_epoch(self, epoch: int) -> None:
        """Enter a master epoch (int32, larger than any seen): epoch file, then epoch-start record, both durable."""
        ...

    def append(self, record: StreamAppend) -> int:
        """Queue one DATA record and return the WAL offset after it; it is durable once `durable_offset` ≥ that offset.

        The buffers must not change until then. Never blocks. Raises `WalFull` before anything was queued, `WalFailed`
        once the WAL has failed, `InvalidInput` for a payload over the limit.
        """
        ...

    def set_on_durable(self, callback: Callable[[int], None]) -> None:
        """Call `callback(durable_offset)` on the event loop each time the durable offset has advanced."""
        ...

    def set_on_failed(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback(error)` on the event loop once, when the WAL has failed permanently."""
        ...

    def note_confirmed(self, confirm_offset: int) -> None:
        """Set the confirm offset, which is written in the headers of later records. Never decreases."""
        ...

    async def trim(self, offset: int) -> None:
        """Free everything before `offset` (≤ confirm offset) in whole files or objects. The caller keeps rule 3."""
        ...

    async def close(self) -> None:
        """Make everything appended durable, then release the files."""
        ...
