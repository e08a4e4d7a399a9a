"""The Kafka partition: one leader's log on four streams.

The offset of the data stream is the Kafka offset; a batch is one stream append. `append` validates, assigns offsets and
passes the bytes to the WAL without waiting. The high watermark advances when the storage confirms them (rule 2), and
the waiters (acknowledgements, long-polling Fetches) are then called. Reads never pass the high watermark, and
read_committed reads never the last stable offset.

The log start is reported like the high watermark: only when the record that moved it is confirmed, because a failover
may revert it before.

Invariants: log start ≤ last stable ≤ high watermark ≤ log end; a failed `append` has changed nothing but the caller's
buffer; after `close` nothing is appended or read.

All methods run on the event loop; the log has no task of its own. Entry: `PartitionLog.open`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tidelog.batch.batch import (
    BatchHeader,
    ControlType,
    CorruptRecord,
    build_control_batch,
    check_batch,
    control_epoch,
    iter_records,
    parse_header,
    set_log_append_time,
)
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Closed, Overloaded, TidelogError
from tidelog.runtime.types import Buffer
from tidelog.storage.records import OffsetTrimmed, StreamEntry
from tidelog.stream.admission import Admission
from tidelog.stream.errors import (
    FencedLeaderEpoch,
    OffsetNotAvailable,
    OffsetOutOfRange,
    UnknownLeaderEpoch,
)
from tidelog.stream.log_cleaning import LogCleaning, last_round
from tidelog.stream.log_config import LogConfig as LogConfig
from tidelog.stream.managers import StreamManager
from tidelog.stream.meta_stream import MetaStream
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_close import ClosedLog, LastRecords, Note, no_note, when_there_is_room
from tidelog.stream.partition_lookup import TimestampOffset, first_at_or_after, largest
from tidelog.stream.partition_recovery import apply_marker, confirmed_end, nothing_first, recover
from tidelog.stream.partition_state import PartitionState
from tidelog.stream.producer_state import BatchEntry, OpenTransaction, VerificationGuard
from tidelog.stream.segments import retention_start, should_roll
from tidelog.stream.stream import Stream
from tidelog.stream.time_index import TimeIndex
from tidelog.stream.trimming import Trimmer
from tidelog.stream.txn_index import AbortedTxn, TxnIndex

if TYPE_CHECKING:
    from tidelog.storage.history import WalHistory
    from tidelog.storage.storage import Storage, StreamWhereabouts

_T = TypeVar("_T")
_PLACE = Struct(">qii")
"""The first 16 bytes of a batch: base offset, length after this field, partition leader epoch. No CRC covers them."""
_TRANSACTIONAL = 0x10
"""Bit of a batch's attributes."""
_HOUSEKEEPING_CHECKPOINT_BYTES = 1 << 20
"""Housekeeping writes a checkpoint after this many bytes, so that slow partitions get one too."""
_HOUSEKEEPING_CHECKPOINT_BATCHES = 8
"""The same for small batches, each of which may be in another object: a scan gets them one by one."""
CONFIRM_WAIT_S = 2.0
"""How long lookups wait for what is not confirmed yet: many times what a write takes, or an election."""
MEASURED_BYTES = 16 << 10
"""Batches from this size on: to check one takes as long as many readings of the clock."""
_WORTH_A_CHECKPOINT_BYTES = 8 << 10
_WORTH_A_CHECKPOINT_BATCHES = 8
"""A scan of fewer bytes and batches is shorter than what a checkpoint costs."""


class AppendResult(NamedTuple):
    """Result of an append."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    """-1 if the topic keeps the producer's timestamps."""
    log_start_offset: int
    """As `PartitionLog.told_log_start`."""
    wal_end: int
    """WAL end of the record. `PartitionLog.when_acked` reports when it is durable by the quorum rule (acks=all)."""
    duplicate: bool
    """The batch is already in the log; these are the original's offsets."""
    checked_at: float = 0.0
    """Monotonic seconds when a batch of `MEASURED_BYTES` or more was checked, with its CRC; 0: not measured."""


class FetchResult(NamedTuple):
    """Result of a read."""

    records: list[bytes | memoryview]
    """Whole batches, in order, as views of the storage's memory: not copied, and never to be modified."""
    aborted: list[tuple[int, int]]
    """`(producer id, first offset)` of aborted transactions in the range; empty unless read_committed."""
    size_bytes: int


class _Inherited(NamedTuple):
    """What a log held when it was opened: an earlier leader may have told clients that it was confirmed."""

    end: int
    log_start: int
    wal_end: int
    """WAL offset after the last record of it that is not confirmed."""


class ProducerInfo(NamedTuple):
    """State of a producer, for DescribeProducers."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    current_txn_start_offset: int
    """-1: no open transaction."""


@dataclass(frozen=True, slots=True)
class LedPartition:
    """Which partition a log is of, and the leader epoch under which it is led."""

    topic: str
    topic_id: bytes
    partition: int
    leader_epoch: int
    is_branch: bool = False
    """Its first offsets were written to another partition (docs/design/0031)."""


class PartitionLog:
    """One partition, led by this process under one leader epoch."""

    __slots__ = (
        "_admission",
        "_cleaning",
        "_clock",
        "_closed",
        "_config",
        "_inherited",
        "_last_wal_end",
        "_log_append_time",
        "_on_confirmed",
        "_opened_at",
        "_start",
        "_start_wal_end",
        "_state",
        "_storage",
        "_trimmer",
        "_unconfirmed",
        "_watchers",
        "batches_scanned",
        "came_at",
        "first_stream",
        "hint_note",
        "leader_epoch",
        "opened_ms",
        "partition",
        "topic",
        "topic_id",
        "wal",
    )

    def __init__(
        self,
        *,
        led: LedPartition,
        state: PartitionState,
        storage: Storage,
        config: LogConfig,
        clock: Clock,
    ) -> None:
        self.topic = led.topic
        self.topic_id = led.topic_id
        self.partition = led.partition
        self.leader_epoch = led.leader_epoch
        self.first_stream = state.meta.stream.stream_id
        """Id of its meta stream, which identifies the partition in the metadata."""
        self.came_at = -math.inf
        """Monotonic seconds at which a live owner handed it over, if one did."""
        self.hint_note: Note = no_note
        """What a move passes on beside the records: from the leader before; once the log is withdrawn, to the next."""
        self.wal: object = storage.confirm
        """Identity of the underlying WAL: the `wal_end`s of logs with the same one are comparable."""
        self._state = state
        self._storage = storage
        self._clock = clock
        self._closed = False
        self._last_wal_end = 0
        self._unconfirmed: deque[tuple[int, int]] | None = None
        self._watchers: dict[object, Callable[[], None]] | None = None
        self._on_confirmed = self._confirmed
        self._start = min(state.confirmed_log_start, state.log_start)
        self._start_wal_end = 0
        self._trimmer = Trimmer(state, storage)
        self._admission = Admission(state, config, clock)
        self._cleaning: LogCleaning | None = None
        self.config = config
        self._await_tail()
        self._opened_at = clock.monotonic()
        self.opened_ms = clock.time_ms()
        """Wall clock at which this broker opened it."""
        self.batches_scanned = 0
        """Batches that it read when it was opened, after an unclean stop."""
        self._inherited = _Inherited(
            state.data.next_offset, state.log_start, max(self._last_wal_end, self._start_wal_end)
        )

    @classmethod
    async def open(
        cls,
        *,
        led: LedPartition,
        streams: tuple[OpenedStream, OpenedStream, OpenedStream, OpenedStream],
        storage: Storage,
        manager: StreamManager,
        config: LogConfig,
        clock: Clock,
        tails: Mapping[int, Sequence[StreamEntry]] | None = None,
        before_scan: Callable[[int], Awaitable[None]] = nothing_first,
    ) -> PartitionLog:
        """Open the log on its four opened streams (meta, data, time, txn), recovering it after an unclean close.

        `tails` holds committed records by stream id that need not be read (`ClosedLog.tails` of the previous owner).
        `before_scan` is awaited, with the offset of the first one, if there are batches to scan.

        Of what the WAL held at the start, all is confirmed in a replica set of one member. A new master of several may
        have an unconfirmed tail: it is served once it is confirmed. Raises `StreamQuarantined`, `CorruptData`,
        `Unavailable`.
        """
        try:
            meta, data, time, txn = (Stream.open(opened, storage, manager) for opened in streams)
            meta.is_opening = data.is_opening = time.is_opening = txn.is_opening = True
            for stream_id, records in (tails or {}).items():
                storage.warm(stream_id, records)
            state = PartitionState(MetaStream(meta), data, TimeIndex(time), TxnIndex(txn))
            scanned = await recover(state, config, clock.time_ms(), before_scan)
            storage.forget_before(data.stream_id, last_round(state).first_dirty)
            state.epochs.assign(led.leader_epoch, data.next_offset)
            state.epochs.truncate_start(state.log_start)
            state.high_watermark = confirmed_end(state)
            log = cls(led=led, state=state, storage=storage, config=config, clock=clock)
            if led.is_branch and not state.load_branch():
                log.begin_branch()
        except BaseException:  # in every case: the next attempt opens the streams again
            for opened in streams:
                storage.close_stream(opened.stream_id)
            raise
        meta.is_opening = data.is_opening = time.is_opening = txn.is_opening = False
        log.batches_scanned = scanned
        return log

    def begin_branch(self) -> None:
        """Make what another partition has written the beginning of this one, which nobody has written to.

        Transactions that are open there are aborted here, and its producers are forgotten: to them this is another
        partition. Repeated after a crash, it goes on where it was. Raises `Overloaded`, `WalFull`, `WalFailed`.
        """
        for one in self.producers():
            if one.current_txn_start_offset >= 0:
                self.write_marker(
                    one.producer_id,
                    one.producer_epoch,
                    commit=False,
                    coordinator_epoch=max(one.coordinator_epoch, 0),
                    transaction_version=0,
                )
        self._state.begin_branch()

    def _await_tail(self) -> None:
        """Show what an earlier master appended when it is confirmed."""
        state, confirm = self._state, self._storage.confirm
        tail = state.data.unconfirmed()
        if tail:
            self._unconfirmed = deque((each.wal_end, each.end_offset) for each in tail)
            self._last_wal_end = tail[-1].wal_end
            for each in tail:
                confirm.add_listener(each.wal_end, self._on_confirmed)
        if self._start < state.log_start:
            moved = state.meta.stream.unconfirmed()
            self._start_wal_end = moved[-1].wal_end if moved else 0
            confirm.add_listener(self._start_wal_end, partial(self._start_confirmed, state.log_start))

    # --- properties ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> LogConfig:
        """Return the effective configuration; it may be replaced at any time."""
        return self._config

    @config.setter
    def config(self, config: LogConfig) -> None:
        self._config = config
        self._log_append_time = config.timestamp_type == "LogAppendTime"
        self._admission.configure(config)

    @property
    def log_start_offset(self) -> int:
        """Return the first readable offset. It is the confirmed one, because an unconfirmed one may be reverted."""
        return self._start

    @property
    def told_log_start(self) -> int:
        """Return the first readable offset for clients; -1 (not known) while the leader before this one may have told a
        later one."""
        return self._start if self._start >= self._inherited.log_start else -1

    @property
    def high_watermark(self) -> int:
        """Return the offset after the last confirmed record."""
        return self._state.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Return the offset up to which all transactions are decided; log start ≤ it ≤ high watermark.

        An open transaction may begin below the log start. The confirmed one is the bound: the move of another may be
        reverted, and what is before it would have been shown undecided.
        """
        stable = self._state.last_stable_offset
        return stable if stable > self._start else self._start

    @property
    def log_end_offset(self) -> int:
        """Return the offset of the next record."""
        return self._state.data.next_offset

    @property
    def closed(self) -> bool:
        """Whether the log is closed."""
        return self._closed

    def size_bytes(self) -> int:
        """Return the bytes of the batches in all segments."""
        return sum(segment.size_bytes for segment in self._state.segments)

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Return `(largest epoch ≤ epoch, its end offset)`, `(-1, -1)` if unknown. See `LeaderEpochs.end_offset`."""
        return self._state.epochs.end_offset(epoch, self.log_end_offset)

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch that wrote `offset`, or -1."""
        return self._state.epochs.epoch_at(offset)

    def producers(self) -> list[ProducerInfo]:
        """Return the state of all known producers."""
        return [
            ProducerInfo(
                state.producer_id,
                state.epoch,
                state.last_sequence,
                state.last_timestamp,
                state.coordinator_epoch,
                state.txn_start_offset,
            )
            for state in self._state.producers.all()
        ]

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the transactions without a marker, by first offset. One that its coordinator has forgotten is hanging:
        it bounds what read_committed readers see until somebody writes its marker."""
        return self._state.producers.open_transactions()

    def add_watermark_listener(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` on the loop when high watermark, last stable or log start offset moves, and at the close.

        Returns a function that removes the listener (any number of times). The callback must be quick and not raise.
        """
        if self._watchers is None:
            self._watchers = {}
        watchers, key = self._watchers, object()
        watchers[key] = callback

        def remove() -> None:
            watchers.pop(key, None)

        return remove

    @property
    def state(self) -> PartitionState:
        """Return what a recovery rebuilds: segments, epochs, producers. It is for reading only."""
        return self._state

    @property
    def cleaning(self) -> LogCleaning:
        """Return its log compaction."""
        if self._cleaning is None:
            self._cleaning = LogCleaning(self._state, self._storage)
        return self._cleaning

    @property
    def inherited_end(self) -> int:
        """Return the log end at which it was opened: what is before it was received earlier, or by another broker."""
        return self._inherited.end

    def whereabouts(self) -> StreamWhereabouts | None:
        """Return where its records are; None when it is closed. See `Storage.whereabouts`."""
        return self._storage.whereabouts(self._state.data.stream_id)

    @property
    def history(self) -> WalHistory:
        """Return when what of its WAL became durable, confirmed and uploaded."""
        return self._storage.history

    @property
    def watermark_listeners(self) -> int:
        """Return the number of watermark listeners: of waiting fetches, for example."""
        return len(self._watchers or ())

    def tell_listeners(self) -> None:
        """Call the watermark listeners of a closed log when the outcome of its move is known."""
        self._notify()

    def _notify(self) -> None:
        if self._watchers:
            for callback in tuple(self._watchers.values()):
                callback()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.topic}-{self.partition} is closed on this broker")

    # --- appending -----------------------------------------------------------------------------------------------

    def append(
        self,
        records: memoryview,
        *,
        guard: VerificationGuard | None = None,
        from_zero: bool = False,
        acks_leader_epoch: int | None = None,
    ) -> AppendResult:
        """Append exactly one batch of a producer. Never waits: see `when_acked`.

        `records` is modified in place and kept: the caller must never change it again. A read-only view is copied.
        `guard`: of `begin_verification`, for the first batch of a transaction. `from_zero`: a transactional producer
        without batches here must start at sequence 0. `acks_leader_epoch` refuses the write unless it is this log's
        epoch. Raises `InvalidRecord`, `CorruptRecord`, `RecordTooLarge`, `UnsupportedCompression`, `InvalidTimestamp`,
        `OutOfOrderSequence`, `EarlierBatchMissing`, `InvalidProducerEpoch`, `InvalidTxnState`,
        `TransactionNotVerified`, `VerificationLapsed`, `FencedLeaderEpoch`, `UnknownLeaderEpoch`, `Closed`, and the
        storage's `WalFull`, `Overloaded` (retriable, nothing was written) and `WalFailed`.
        """
        self._require_open()
        if acks_leader_epoch is not None and acks_leader_epoch != self.leader_epoch:
            self._refuse_epoch(acks_leader_epoch)
        try:
            header = check_batch(records, limit_bytes=self._config.max_message_bytes)
            if header.producer_id >= 0:
                original = self._admission.original_of(header)
                if original is not None:
                    return self._duplicate(original)
                if header.attributes & _TRANSACTIONAL:
                    self._state.producers.require_verified(header, guard)
                    if from_zero:
                        self._state.producers.require_first_sequence(header)
            now_ms = self._clock.time_ms()
            is_measured = len(records) >= MEASURED_BYTES
            records, header = self._admission.prepare(records, header, now_ms)
            checked_at = self._clock.monotonic() if is_measured else 0.0
            result = self._append(records, header, now_ms, None if self._log_append_time else header.crc)
            return result._replace(checked_at=checked_at) if is_measured else result
        except Overloaded:
            self._admission.note_no_room(header)
            raise
        except CorruptRecord:  # its producer, whoever that is, sends it again
            self._admission.note_refused()
            raise

    def append_internal(
        self, batch: Buffer, *, guard: VerificationGuard | None = None, transaction_version: int = 0
    ) -> AppendResult:
        """Append one batch of the broker's own (group and transaction records, markers), built by `build_batch`.

        Control batches are accepted, by the rules of their `transaction_version` (0–2); size, keys and sequences are
        not checked. A batch in a producer's transaction needs a `guard` as in `append`. Raises as `append`, and
        `FencedCoordinator`.
        """
        self._require_open()
        view = memoryview(batch)
        if view.readonly:
            view = memoryview(bytearray(batch))
        header = parse_header(view)
        assert header.size_bytes == len(view)
        assert header.last_offset_delta == header.count - 1
        now_ms = self._clock.time_ms()
        if header.is_control:
            record = next(iter_records(view, header=header))
            self._state.producers.check_marker(header, control_epoch(record), transaction_version)
            result = self._append(view, header, now_ms)
            self._state.producers.end_verification(header.producer_id, transaction_version)
            return result
        if header.is_transactional:
            self._state.producers.require_verified(header, guard)
        return self._append(view, header, now_ms)

    def write_marker(
        self,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
        coordinator_epoch: int,
        transaction_version: int,
    ) -> AppendResult:
        """Append the marker that ends a producer's transaction. Never waits: it decides once it is confirmed.

        A marker without an open transaction is appended, too: it is a repeat, or the transaction had no batch here.
        With `transaction_version` 2 `producer_epoch` is the one after that of the transaction's batches.
        `coordinator_epoch`: int32, the leader epoch of the coordinator's state partition. Raises
        `InvalidProducerEpoch`, `FencedCoordinator`, `Closed`, and as `append` what the storage raises.
        """
        batch = build_control_batch(
            ControlType.COMMIT if commit else ControlType.ABORT,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            coordinator_epoch=coordinator_epoch,
            timestamp=self._clock.time_ms(),
        )
        return self.append_internal(batch, transaction_version=transaction_version)

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Return whether the producer's next transactional batch in this epoch needs no word of the coordinator."""
        return self._state.producers.has_open_transaction(producer_id, producer_epoch)

    def begin_verification(self, producer_id: int, producer_epoch: int) -> VerificationGuard:
        """Return a guard for `append`. Call it before the coordinator is asked whether the transaction has this
        partition.

        Any append of the producer makes it invalid, and any marker but those of transaction version 2; it is valid for
        this log only. Raises `InvalidProducerEpoch`, `Closed`.
        """
        self._require_open()
        return self._state.producers.begin_verification(producer_id, producer_epoch, self._clock.time_ms())

    def _append(self, view: memoryview, header: BatchHeader, now_ms: int, batch_crc: int | None = None) -> AppendResult:
        """Append a checked batch. `batch_crc`: its verified CRC32C; the batch is then written unchanged."""
        state, config = self._state, self._config
        log_append_time = -1
        timestamp = header.max_timestamp
        if self._log_append_time:
            log_append_time = timestamp = now_ms
            set_log_append_time(view, now_ms)
        if not state.dirty:
            state.mark_dirty()
        if should_roll(state.segments[-1], len(view), timestamp, now_ms, config):
            state.roll(now_ms)
        elif state.bytes_since_checkpoint >= config.checkpoint_bytes or (
            state.batches_since_checkpoint >= config.checkpoint_batches  # without a call, as it rarely is
            and state.has_many_batches(config.checkpoint_batches)
        ):
            state.checkpoint()
        elif state.writing is not None:
            state.write_piece()
        if state.txn.waiting:
            state.txn.flush()
        data = state.data
        base = data.next_offset
        _PLACE.pack_into(view, 0, base, header.length, self.leader_epoch)
        _, wal_end = data.append(header.last_offset_delta + 1, (view,), batch_crc)
        state.track(header, base, timestamp, now_ms, config)
        if header.is_control:
            wal_end = self._end_transaction(header, view, base, now_ms, wal_end)
        self._last_wal_end = wal_end
        unconfirmed = self._unconfirmed
        if unconfirmed is None:
            unconfirmed = self._unconfirmed = deque()
        unconfirmed.append((wal_end, data.next_offset))
        self._storage.confirm.add_listener(wal_end, self._on_confirmed)
        return AppendResult(
            base,
            base + header.last_offset_delta,
            log_append_time,
            self._start if self._start >= self._inherited.log_start else -1,  # `told_log_start`, without a call
            wal_end,
            False,  # by position: a keyword costs as much as a call
        )

    def _end_transaction(self, header: BatchHeader, view: memoryview, base: int, now_ms: int, wal_end: int) -> int:
        aborted = apply_marker(self._state, header, view, base, now_ms)
        return wal_end if aborted is None else max(wal_end, self._state.note_aborted(aborted))

    def _duplicate(self, original: BatchEntry) -> AppendResult:
        state = self._state
        # The original may not be durable yet: waiting for the last append covers it.
        wal_end = 0 if original.last_offset < state.high_watermark else self._last_wal_end
        return AppendResult(
            original.base_offset,
            original.last_offset,
            original.timestamp if self._log_append_time else -1,
            self.told_log_start,
            wal_end,
            duplicate=True,
        )

    def _refuse_epoch(self, epoch: int) -> None:
        what = f"leader epoch {epoch} of {self.topic}-{self.partition} is not the current one, {self.leader_epoch}"
        raise FencedLeaderEpoch(what) if epoch < self.leader_epoch else UnknownLeaderEpoch(what)

    def _confirmed(self) -> None:
        value, pending, state = self._storage.confirm.value, self._unconfirmed, self._state
        assert pending is not None
        offset = -1
        while pending and pending[0][0] <= value:
            offset = pending.popleft()[1]
        if offset > state.high_watermark:
            state.high_watermark = offset
            state.producers.confirmed(offset)
            if self._watchers:
                self._notify()

    def check_writable(self) -> None:
        """Raise if fewer replicas are in sync than a write of acks=all needs (`min.insync.replicas`), a retriable
        error. With one replica, which the bucket makes durable, it never does."""
        try:
            self._storage.check_writable(self._config.min_insync_replicas)
        except TidelogError:
            self._admission.note_refused()
            raise

    def note_refused(self) -> None:
        """Note that a batch was refused for another reason than its own, and will be sent again: one that its producer
        has sent behind it must not be taken first. `append` and `check_writable` do it themselves."""
        self._admission.note_refused()

    def when_acked(
        self, wal_end: int, callback: Callable[[], None], failed: Callable[[Exception], None] | None = None
    ) -> None:
        """Call `callback` once when everything up to `wal_end` (`AppendResult.wal_end`) is durable by the quorum rule.

        The call is immediate if that is already the case. If this process is fenced or its WAL fails before, `failed`
        is called with the error instead: the write may take effect or not. Of several appends to logs on one `wal`,
        wait only for the largest `wal_end`. The callbacks must be quick and not raise.
        """
        self._storage.confirm.add_listener(wal_end, callback, failed)

    def when_durable(
        self, wal_end: int, callback: Callable[[], None], failed: Callable[[Exception], None] | None = None
    ) -> None:
        """As `when_acked`, but once everything up to `wal_end` is durable in the WAL of this broker alone (acks=1).

        The quorum may lack it: nobody reads it yet, and it may be cut if another broker is elected.
        """
        self._storage.durable.add_listener(wal_end, callback, failed)

    def is_acked(self, wal_end: int) -> bool:
        """Return whether `when_acked` would call back now."""
        return wal_end <= self._storage.confirm.value

    def is_durable(self, wal_end: int) -> bool:
        """Return whether `when_durable` would call back now."""
        return wal_end <= self._storage.durable.value

    async def wait_acked(self, wal_end: int) -> None:
        """Return when everything up to `wal_end` is durable by the quorum rule.

        Raises `WalFailed`, `Fenced`, `Closed` if this process will not see that.
        """
        await self._storage.confirm.wait(wal_end)

    async def writable(self) -> None:
        """Return when an append refused with `Overloaded` or `WalFull` would fit. Raises as `Storage.writable`."""
        await self._storage.writable()

    # --- reading -------------------------------------------------------------------------------------------------

    def _read_bound(self, offset: int, *, committed: bool) -> int:
        self._require_open()
        state = self._state
        if not self._start <= offset <= state.data.next_offset:
            raise OffsetOutOfRange(
                f"offset {offset} of {self.topic}-{self.partition} is outside {self._start}..{self.log_end_offset}"
            )
        return self.last_stable_offset if committed else state.high_watermark

    def read_hot(self, offset: int, max_bytes: int, *, committed: bool) -> FetchResult | None:
        """As `read` with `minimum_one`, from memory and without waiting; None if the bucket must be read."""
        bound = self._read_bound(offset, committed=committed)
        if offset >= bound:
            return FetchResult([], [], 0)
        found = self._state.data.read_hot(offset, bound, max_bytes)
        if found is None:
            return None
        result = _fetched(found, [])
        if not committed or not result.records:
            return result if result.records else None  # holes only: `read` goes on to a batch
        aborted = self._state.txn.lookup_hot(offset, _end(found))
        return None if aborted is None else result._replace(aborted=_pairs(aborted))

    async def read(
        self, offset: int, max_bytes: int, *, committed: bool, minimum_one: bool = True, is_urgent: bool = False
    ) -> FetchResult:
        """Return whole batches from the one that contains `offset`, up to `max_bytes` and the isolation level's bound.

        What log compaction removed is passed over: they may begin after `offset`. The first batch is returned even if
        it is larger than `max_bytes`, unless `minimum_one` is off. Empty at the bound. `is_urgent`: as
        `BlockReader.read` has it. Raises `OffsetOutOfRange`, `Closed`, `CorruptData`, `Unavailable`.
        """
        bound = self._read_bound(offset, committed=committed)
        if offset >= bound:
            return FetchResult([], [], 0)
        at = offset
        while True:
            try:
                found = await self._state.data.read(at, bound, max_bytes, is_urgent=is_urgent)
            except OffsetTrimmed as error:  # trimmed by retention during the read
                raise OffsetOutOfRange(error.message) from error
            result = _fetched(found, [])
            at = _end(found)
            if result.records or at >= bound:
                break
        if not minimum_one and result.records and len(result.records[0]) > max_bytes:
            return FetchResult([], [], 0)
        if not committed:
            return result
        aborted = await self._undisturbed(lambda: self._state.txn.lookup(offset, at))
        start = self._state.data.start_offset
        left = [one for one in found if one.base_offset + one.count > start]
        if not left:
            raise OffsetOutOfRange(f"offsets {offset} to {at} of {self.topic}-{self.partition} were deleted")
        if len(left) < len(found):  # deleted during the read: the index may have forgotten what of it was aborted
            result = _fetched(left, [])
        return result._replace(aborted=_pairs(aborted))

    async def offset_for_timestamp(self, timestamp_ms: int, *, committed: bool = False) -> TimestampOffset | None:
        """Return `(offset, timestamp, leader epoch)` of the first visible record at or after `timestamp_ms`, or None.

        Raises `Closed`, `CorruptData`, `Unavailable`.
        """
        self._require_open()
        bound = self.last_stable_offset if committed else self.high_watermark
        return await self._undisturbed(lambda: first_at_or_after(self._state, timestamp_ms, bound))

    async def offset_of_max_timestamp(self, *, committed: bool = False) -> TimestampOffset | None:
        """Return `(offset, timestamp, leader epoch)` of the first visible record with the largest timestamp, or None.

        It waits a little for what is being written: else that hides the largest of a segment, which is then searched.
        Raises as `offset_for_timestamp`.
        """
        self._require_open()
        await self._wait_confirmed(self._last_wal_end, CONFIRM_WAIT_S)
        bound = self.last_stable_offset if committed else self.high_watermark
        return await self._undisturbed(lambda: largest(self._state, bound))

    async def _undisturbed(self, look: Callable[[], Awaitable[_T]]) -> _T:
        """Return what a lookup finds; it begins anew where the streams begin when they are trimmed in its middle."""
        while True:
            starts = [stream.start_offset for stream in self._streams()]
            try:
                return await look()
            except OffsetTrimmed:
                if starts == [stream.start_offset for stream in self._streams()]:
                    raise

    async def wait_inherited(self) -> bool:
        """Return whether everything is visible that the log held when it was opened, after a wait for that.

        Otherwise the high watermark may be lower than the one that the leader before this one has told. Nobody waits
        later than `CONFIRM_WAIT_S` after the opening. Raises `Closed`, and what ends the master's term.
        """
        inherited = self._inherited
        if self.high_watermark < inherited.end or self._start < inherited.log_start:
            limit_s = self._opened_at + CONFIRM_WAIT_S - self._clock.monotonic()
            await self._wait_confirmed(inherited.wal_end, limit_s)
        self._require_open()
        return self.high_watermark >= inherited.end

    async def _wait_confirmed(self, wal_end: int, limit_s: float) -> None:
        """Return when everything up to `wal_end` is confirmed, or after `limit_s` seconds."""
        if limit_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._storage.confirm.wait(wal_end)

    # --- housekeeping --------------------------------------------------------------------------------------------

    async def delete_records(self, before_offset: int) -> int:
        """Delete all records below `before_offset` (-1: the high watermark). Returns the new log start, durable.

        Raises `OffsetOutOfRange` past the high watermark, `OffsetNotAvailable` while the leader before this one may
        have told a later log start, `Closed`, `Overloaded`, `WalFull`.
        """
        self._require_open()
        state = self._state
        target = state.high_watermark if before_offset == -1 else before_offset
        if target < 0 or target > state.high_watermark:
            raise OffsetOutOfRange(
                f"cannot delete up to {before_offset} in {self.topic}-{self.partition}: "
                f"the high watermark is {state.high_watermark}"
            )
        await self._move_start(target)
        if self._start < target:  # closed during an earlier trim: nothing has moved
            self._require_open()
        if self.told_log_start < 0:
            raise OffsetNotAvailable(
                f"the log start of {self.topic}-{self.partition} is not known yet: its new leader waits for the quorum",
                hint="try again",
            )
        return self._start

    async def apply_retention(self) -> int:
        """Drop segments by age and size, remove silent producers, compact the meta stream. Returns the new log start.

        Call it every few minutes. Raises `Closed`, `Overloaded`, `WalFull`; the next call repeats the failed work.
        """
        self._require_open()
        state, now_ms = self._state, self._clock.time_ms()
        state.producers.expire(now_ms, self._config.producer_id_expiration_ms)
        if state.bytes_since_checkpoint >= _HOUSEKEEPING_CHECKPOINT_BYTES or state.has_many_batches(
            _HOUSEKEEPING_CHECKPOINT_BATCHES
        ):
            state.checkpoint()
            await self._in_steps(partial(state.write_producers_to, state.checkpoint_offset))
        start = retention_start(
            state.segments, state.log_start, state.high_watermark, self.log_end_offset, now_ms, self._config
        )
        await self._move_start(start)
        await self._in_steps(self._trimmer.rewrite_meta)
        if not self._closed:
            await self._trimmer.trim_meta()
        return self._start

    @property
    def batches_to_scan(self) -> int:
        """Return the number of batches behind the last checkpoint, which an open without a clean close scans; 0 while
        that is shorter than the next checkpoint, with the states of all producers."""
        batches = self._state.batches_since_checkpoint
        return batches if batches and self._state.has_many_batches(1) else 0

    async def write_checkpoint(self) -> None:
        """Shorten the scan of an open without a clean close, if it is worth that.

        Raises `Closed`, `Overloaded`, `WalFull`, `WalFailed`; then the scan is as long as it was.
        """
        self._require_open()
        state = self._state
        if state.bytes_since_checkpoint >= _WORTH_A_CHECKPOINT_BYTES or state.has_many_batches(
            _WORTH_A_CHECKPOINT_BATCHES
        ):
            state.checkpoint()
            await self._in_steps(partial(state.write_producers_to, state.checkpoint_offset))

    async def cut(self) -> tuple[int, int, int, int]:
        """Return the ends of its meta, data, time and txn stream, when everything before them is confirmed.

        A checkpoint comes first, so that what is opened with these ends scans little. Raises `Closed`, `Overloaded`,
        `WalFull`, `WalFailed`.
        """
        self._require_open()
        state = self._state
        if state.checkpoint_offset < state.data.next_offset:
            state.checkpoint()
            await self._in_steps(partial(state.write_producers_to, state.checkpoint_offset))
            self._require_open()
        while self._trimmer.is_rewriting:  # else the trim after it would leave a part of it before the end
            await self._in_steps(self._trimmer.rewrite_meta)
            self._require_open()
        meta, data, time, txn = (stream.next_offset for stream in self._streams())
        await self._storage.confirm.wait(self._storage.data_end)
        self._require_open()
        return meta, data, time, txn

    @property
    def can_shorten_meta(self) -> bool:
        """Whether `shorten_meta` has something to do now. An open reads the whole meta stream."""
        return self._trimmer.can_shorten_meta

    async def shorten_meta(self) -> None:
        """Rewrite a meta stream that is mostly garbage, or trim it, if the bucket holds its rewrite.

        Raises `Closed`, `Fenced`, `Overloaded`, `WalFull`, `WalFailed`; then it is as long as it was.
        """
        self._require_open()
        await self._in_steps(self._trimmer.rewrite_meta)
        if self._trimmer.can_shorten_meta and not self._closed:
            await self._trimmer.trim_meta()

    async def _in_steps(self, step: Callable[[], bool]) -> None:
        """Call `step` until it returns False or the log is closed; the loop is free between the calls."""
        while not self._closed:
            if not step():
                return
            await asyncio.sleep(0)

    async def _move_start(self, offset: int) -> None:
        """Return when a log start of `offset` at least is confirmed, or the log is closed."""
        await self._trimmer.trim()
        state = self._state
        if offset <= self._start or self._closed:
            return
        if offset > state.log_start:
            await self._in_steps(partial(state.write_producers_to, offset))
        if offset > state.log_start and not self._closed:
            self._start_wal_end = state.move_start(offset, self._clock.time_ms())
            self._trimmer.start_moved(self._start_wal_end)
            self._storage.confirm.add_listener(self._start_wal_end, partial(self._start_confirmed, offset))
        await self._storage.confirm.wait(self._start_wal_end)
        await self._trimmer.trim()

    def _start_confirmed(self, offset: int) -> None:
        if offset > self._start:
            self._storage.history.start_moved(self.first_stream, offset)
        self._start = max(self._start, offset)
        self._notify()

    async def close(self) -> None:
        """Close cleanly: stop appends, then write a checkpoint with the clean flag, durably. Idempotent.

        Raises `Overloaded`, `WalFull`, `WalFailed` if the checkpoint cannot be written. The log is closed nevertheless,
        and the next open scans.
        """
        if not self._closed:
            last = LastRecords(self._state)
            await self._close(last, last.write_clean)

    async def close_for_move(self) -> ClosedLog:
        """As `close`, but write the whole meta stream again as its last record: all that another broker has to read.

        Everything up to the confirm offset must be uploaded before the streams are handed over.
        """
        assert not self._closed
        last = LastRecords(self._state)
        await self._close(last, last.write_for_move)
        return last.closed_log()

    async def _close(self, last: LastRecords, write: Callable[[], bool]) -> None:
        self._closed = True
        self._state.abandon_snapshot()
        self._notify()
        try:
            await when_there_is_room(self._storage, write, f"{self.topic}-{self.partition}")
        finally:
            try:  # the next opener assumes that all records of the streams are confirmed
                await self._storage.confirm.wait(max(self._last_wal_end, last.wal_end))
            finally:
                await self._close_streams()

    async def drop(self) -> None:
        """Stop serving because the topic was deleted. Records that are not uploaded may be discarded."""
        if self._closed:
            return
        self._closed = True
        self._notify()
        for stream in self._streams():
            stream.drop()
        await self._close_streams()

    def _streams(self) -> tuple[Stream, Stream, Stream, Stream]:
        state = self._state
        return state.meta.stream, state.data, state.time.stream, state.txn.stream

    async def _close_streams(self) -> None:
        for stream in self._streams():
            await stream.close()


def _end(found: list[StreamEntry]) -> int:
    last = found[-1]
    return last.base_offset + last.count


def _fetched(found: list[StreamEntry], aborted: list[tuple[int, int]]) -> FetchResult:
    records = [record.payload for record in found if record.payload]
    return FetchResult(records, aborted, sum(map(len, records)))


def _pairs(aborted: list[AbortedTxn]) -> list[tuple[int, int]]:
    return [(one.producer_id, one.first_offset) for one in aborted]
