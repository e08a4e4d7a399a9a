"""The write-ahead log of one replica set, as the rest of the house sees it.

A WAL is a sequence of records addressed by byte offset (int64): the same bytes at the same offsets on every member. All
streams of the replica set are interleaved in it. It is appended at `end_offset`, durable up to `durable_offset`,
confirmed (the quorum rule met) up to the confirm offset that the owner tells it, and trimmed at the front.

Invariants: start ≤ durable ≤ end; a record is never split over files; what `append` returned an offset for is either
made durable in order or the WAL fails as a whole (`StorageFailed`), after which nothing more is acknowledged.

Backends: `storage.wal_disk`, `storage.wal_s3`, `storage.wal_memory`; what they have in common is `storage.wal_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from runtime.errors import Overloaded, StorageFailed
from storage.object_store import Buffer


class WalRecordType(IntEnum):
    """What a WAL record carries (uint8)."""

    DATA = 1
    """A batch of one stream."""
    EPOCH_START = 2
    """The first bytes of a master's epoch; no payload (hot-tier.md A1)."""


class WalFull(Overloaded):
    """The WAL is at its bound or the disk is full: retry later. Kafka: KAFKA_STORAGE_ERROR (56), retriable."""

    kafka_code = 56


class WalFailed(StorageFailed):
    """The disk under the WAL failed (an fsync error, say): this process must not use the WAL any more."""


@dataclass(frozen=True, slots=True)
class WalRecord:
    """One record as read back. `payload` is a view that stays valid as long as it is referenced."""

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
    """How many stream offsets the payload covers (≥ 1 for DATA)."""
    payload: memoryview


class Wal(Protocol):
    """A write-ahead log. All methods are called on the event loop's thread."""

    @property
    def start_offset(self) -> int:
        """The first byte kept."""
        ...

    @property
    def end_offset(self) -> int:
        """The byte after the last one appended."""
        ...

    @property
    def durable_offset(self) -> int:
        """The byte after the last one known durable."""
        ...

    @property
    def master_epoch(self) -> int:
        """The epoch records are appended in; -1 before `begin_epoch`."""
        ...

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """Scan from the start to the end, cut a torn tail durably, call `on_record` for each whole record in order.

        Returns the confirm offset that the records prove (the largest one written in a header). Called once, before
        anything else. Raises `CorruptData` when bytes that were durable fail their check (not a torn tail).
        """
        ...

    async def reset(self, offset: int) -> None:
        """Start over, empty, at WAL offset `offset`; between `recover` and `begin_epoch` (hot-tier.md A5)."""
        ...

    async def writable(self, payload_bytes: int = 0) -> None:
        """Wait until an append of `payload_bytes` would not raise `WalFull`. Raises `WalFailed`."""
        ...

    async def begin_epoch(self, epoch: int) -> None:
        """Enter a master epoch (int32, larger than any seen): epoch file, then epoch-start record, both durable."""
        ...

    def append(
        self,
        stream_id: int,
        stream_epoch: int,
        base_offset: int,
        count: int,
        payload: Sequence[Buffer],
        batch_crc: int | None = None,
    ) -> int:
        """Queue one DATA record and return the WAL offset after it; it is durable once `durable_offset` ≥ that.

        The buffers must not change until then. Never blocks. Raises `WalFull` before anything was queued, `WalFailed`
        once the WAL has failed, `InvalidInput` for a payload over the limit.

        `batch_crc` says that the payload is one buffer with one record batch (v2) and the CRC32C (uint32) that it was
        checked against: the record's checksum may follow from it (`storage.checksum`).
        """
        ...

    def set_on_durable(self, callback: Callable[[int], None]) -> None:
        """`callback(durable_offset)` is called on the loop each time the durable offset has moved."""
        ...

    def set_on_failed(self, callback: Callable[[Exception], None]) -> None:
        """`callback(error)` is called on the loop once, when the WAL has failed for good."""
        ...

    def note_confirmed(self, confirm_offset: int) -> None:
        """The confirm offset now; it rides in the header of the records appended from here on. Never goes back."""
        ...

    async def trim(self, offset: int) -> None:
        """Free what lies wholly before `offset` (≤ confirm offset). The caller keeps rule 3."""
        ...

    async def close(self) -> None:
        """Make all that was appended durable, then release the files."""
        ...
