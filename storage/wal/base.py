"""The interface of the write-ahead log of one replica set.

A WAL is a sequence of records addressed by byte offset (int64): the same bytes at the same offsets on every member. The
records of all streams of the replica set are interleaved in it. It is appended at `end_offset`, durable up to
`durable_offset`, confirmed (the quorum rule met) up to the confirm offset that its owner passes to it, and trimmed at
the front.

Invariants: start ≤ durable ≤ end; a record is never split over files; records that `append` accepted
become durable in order, or the WAL fails as a whole (`StorageFailed`), after which nothing more is acknowledged.

Backends: `tidelog.storage.wal.disk.wal`, `tidelog.storage.wal.s3.wal`, `tidelog.storage.wal.memory`; their common part
is `tidelog.storage.wal.state`. A WAL of which there are several replicas is a `ReplicatedWal`: on disk or in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from tidelog.runtime.errors import InvalidInput, Overloaded, StorageFailed
from tidelog.runtime.types import Buffer
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


class RawRecords(NamedTuple):
    """Whole durable records as they are in the log, for sending; all of one master epoch."""

    offset: int
    """WAL offset of the first byte."""
    end_offset: int
    epoch: int
    """The master epoch that wrote them (int32)."""
    epoch_start: int
    """WAL offset at which that epoch begins; before `offset`, or `offset` itself."""
    buffers: list[memoryview]
    """The bytes from `offset` to `end_offset`, in order, checked; each buffer holds whole records."""


class Submitted(NamedTuple):
    """Whole records as they were passed to the disk, which may not be durable yet; all of one master epoch."""

    offset: int
    """WAL offset of the first byte."""
    end_offset: int
    buffers: list[Buffer]
    """The bytes from `offset` to `end_offset`, in order: of each record its header, then the buffers of its payload."""


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

    @property
    def missing_files(self) -> tuple[str, ...]:
        """Return the names of the log's files that were removed or replaced while it has them open."""
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
        """Free everything before `offset` (≤ confirm offset) in whole files or objects. The caller keeps rule 3.

        `offset` is the WAL end of a commit, so a record boundary, and `start_offset` always is one.
        """
        ...

    async def close(self) -> None:
        """Make everything appended durable, then release the files."""
        ...


@runtime_checkable
class ReplicatedWal(Wal, Protocol):
    """A WAL of which several brokers have a replica: one of them, the master, appends; followers receive.

    docs/design/0015-hot-tier.md has the reasons. A replica is a follower from `recover` until `begin_epoch`, and again
    after it has promised an epoch larger than its own. What a master asks a follower to do carries the master's epoch,
    and is refused (`Fenced`) below the promised one; a larger one is promised durably first. So nothing that was
    acknowledged to one master is cut or overwritten on behalf of an older one.

    `receive`, `truncate` and `restart_at` are for a follower; a master raises `InvalidInput`. All of these methods run
    one after the other, whatever the order of their callers.
    """

    @property
    def promised_epoch(self) -> int:
        """Return the smallest master epoch from which it still takes anything; -1: from any."""
        ...

    @property
    def confirm_offset(self) -> int:
        """Return the largest confirm offset that was recovered or noted; it may lie past the end of a follower."""
        ...

    def set_on_submitted(self, callback: Callable[[Submitted], None] | None) -> None:
        """Call `callback` with what a master has appended, in order, when it is passed to the disk: not durable yet.

        None: nobody is called any more.
        It may be sent to followers already (docs/design/0015-hot-tier.md, section 8). The callback runs on the event
        loop before the disk's write begins, and must not raise, append, or change the WAL.
        """
        ...

    async def promise(self, epoch: int) -> None:
        """Take nothing from a master of an epoch below `epoch` (int32) any more, and begin no such epoch: durably.

        When it returns, `end_offset` is durable, and no byte of an older master comes after it. Ends the mastership of
        a WAL that is in an older epoch. Promised twice is promised once. Raises `Fenced` if a larger epoch was promised
        or seen, `WalFull` if the disk has no room for the promise (nothing was promised then), `WalFailed`.
        """
        ...

    async def receive(
        self, offset: int, epoch: int, epoch_start: int, records: Buffer, *, master_epoch: int
    ) -> list[WalRecord]:
        """Append records that a master has sent, from WAL offset `offset` on, which must be the end of this log.

        `records` are whole records of the master epoch `epoch`, which began at `epoch_start`, as `read_raw` returns
        them; `master_epoch` is the epoch of the sender, at least `epoch`. They are checked before anything is queued.
        The first byte of an epoch makes its entry in the epoch history. The buffer must not change from then on.

        Returns the records that were accepted, at least one: all that there is room for. The rest is for a later call.
        They become durable as those of `append` do. Raises `Fenced`, `CorruptData` for records that fail a check,
        `InvalidInput` for bytes that do not continue this log, `WalFull` before anything was queued (wait with
        `receivable`), `WalFailed`.
        """
        ...

    async def receivable(self, records: Buffer) -> None:
        """Wait until there is room for the first of `records`. Raises `WalFailed`, `Closed`."""
        ...

    async def truncate(self, offset: int, *, master_epoch: int) -> None:
        """Cut the log at `offset`, durably: after a crash it is the old log or the cut one.

        `offset` is a record boundary from the start to the end; the epochs without a byte left are forgotten, also when
        no byte is cut. Raises `CorruptData` for an offset below the confirm offset (rule 8), or inside a record;
        `InvalidInput` for one outside the log; `Fenced`; `WalFull` if the disk has no room for the epoch file (call
        again); `WalFailed`.
        """
        ...

    async def restart_at(self, offset: int, *, master_epoch: int, kept_as: str = "") -> None:
        """Start over, empty, at `offset`, because the bucket has everything that the log holds. Raises as `truncate`.

        The caller keeps rule 3: it knows that all of the log is committed, or has its files kept under the suffix
        `kept_as`, which was not used before.
        """
        ...

    async def read_raw(self, start_offset: int, max_bytes: int) -> RawRecords | None:
        """Return durable records from record boundary `start_offset` on, for sending; None at the durable end.

        They are of one epoch, at least one record, and end with the one that reaches `max_bytes` at the latest.
        `start_offset` of the log is such a boundary. Raises `NotFound` if it was trimmed, `CorruptData` if the bytes
        fail their check, `WalFailed`.
        """
        ...

    async def read_records(self, start_offset: int, max_bytes: int) -> list[WalRecord]:
        """Return durable records from record boundary `start_offset` on, at least one if there is one.

        Stops with the record that reaches `max_bytes`, or earlier. Raises as `read_raw`.
        """
        ...


def replicated(wal: Wal) -> ReplicatedWal:
    """Return the WAL as one that can have several replicas. Raises `InvalidInput` for a WAL in the bucket."""
    if not isinstance(wal, ReplicatedWal):
        raise InvalidInput(
            "a write-ahead log in the bucket has one member",
            hint='set wal.kind = "disk" for a replica set of several members',
        )
    return wal
