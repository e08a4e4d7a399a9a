"""The Kafka partition: one leader's log on four streams.

The offset of the data stream is the Kafka offset; a batch is one stream append. `append` validates, assigns offsets
and hands the bytes to the WAL without waiting; the high watermark follows when the storage confirms (rule 2), and
everything that waits for it (acks, long polls) is called then. Reads never pass the high watermark, and read_committed
ones never the last stable offset.

The log start is told like the high watermark: only once the record that moved it is confirmed. Until then a failover
takes it back.

Invariants: log start ≤ last stable ≤ high watermark ≤ log end; `append` either has done everything or has changed
nothing but the caller's buffer; after `close` nothing is appended or read.

All methods run on the event loop; there is no task of the log's own. Entry: `PartitionLog.open`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from runtime.clock import Clock
from runtime.errors import Closed, Overloaded
from storage.record_batch import (
    BatchHeader,
    Compression,
    InvalidRecord,
    InvalidTimestamp,
    check_batch,
    control_epoch,
    iter_records,
    parse_header,
    repack,
    set_log_append_time,
)
from storage.records import OffsetTrimmed, StreamRecord
from stream.errors import FencedLeaderEpoch, OffsetOutOfRange, UnknownLeaderEpoch
from stream.log_config import LogConfig as LogConfig
from stream.managers import OpenedStream, StreamManager
from stream.meta_stream import MetaStream
from stream.partition_lookup import TimestampOffset, first_at_or_after, largest
from stream.partition_recovery import apply_marker, recover
from stream.partition_state import PartitionState
from stream.producer_state import BatchEntry
from stream.segments import retention_start, should_roll
from stream.stream import Stream
from stream.time_index import TimeIndex
from stream.trimming import Trimmer
from stream.txn_index import TxnIndex

if TYPE_CHECKING:
    from storage.storage import Storage

log = logging.getLogger(__name__)

_OFFSET = Struct(">q")
_EPOCH = Struct(">i")
_CODECS = {
    "uncompressed": Compression.NONE,
    "gzip": Compression.GZIP,
    "snappy": Compression.SNAPPY,
    "lz4": Compression.LZ4,
    "zstd": Compression.ZSTD,
}
_MAX_RECORD_ERRORS = 100
"""A response names so many records without a key; the rest are as bad."""
_HOUSEKEEPING_CHECKPOINT_BYTES = 1 << 20
"""Housekeeping writes a checkpoint once this much was appended, so that a slow partition does not wait for its turn."""

META_TAIL_BYTES = 1 << 20
"""A partition whose metadata is larger (thousands of segments or producers) is opened from the bucket."""
DATA_TAIL_BYTES = 256 << 10
"""What the consumers at the end of the log ask for first."""
_CLOSE_WAIT_S = 10.0
"""How long a close waits for room in the WAL; without a clean record the next opening scans, nothing worse."""


class AppendResult(NamedTuple):
    """What became of a batch."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    """-1 where the topic keeps the producer's timestamps."""
    log_start_offset: int
    wal_end: int
    """`storage.confirm.wait(wal_end)` returns once the batch is durable by the quorum rule (acks=all)."""
    duplicate: bool
    """The batch was in the log before: these are the original's offsets."""


class FetchResult(NamedTuple):
    """What a read found."""

    records: list[bytes | memoryview]
    """Whole batches, in order, as they lie in memory: not copied, never to be written to."""
    aborted: list[tuple[int, int]]
    """`(producer id, first offset)` of aborted transactions in the range; empty unless read_committed."""
    size_bytes: int


class ProducerInfo(NamedTuple):
    """A producer as DescribeProducers tells it."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    current_txn_start_offset: int
    """-1: no open transaction."""


class ClosedLog(NamedTuple):
    """Where a log that was closed for a move ends, and what its next owner will read first."""

    end_offsets: tuple[int, int, int, int]
    """Of the meta, data, time and txn streams."""
    meta_start: int
    """Whoever opens the log next need not read the meta stream before this offset."""
    tails: dict[int, list[StreamRecord]]
    """By stream id: the meta stream from `meta_start` on, the newest batches of the data stream. Confirmed. Empty where
    it is not all in memory or exceeds `META_TAIL_BYTES`."""


class PartitionLog:
    """One partition, led by this process under one leader epoch."""

    __slots__ = (
        "_clock",
        "_closed",
        "_codec",
        "_compacts",
        "_config",
        "_last_wal_end",
        "_log_append_time",
        "_on_confirmed",
        "_start",
        "_start_wal_end",
        "_state",
        "_storage",
        "_trimmer",
        "_unconfirmed",
        "_watchers",
        "came_at",
        "first_stream",
        "leader_epoch",
        "partition",
        "topic",
        "topic_id",
    )

    def __init__(
        self,
        *,
        topic: str,
        topic_id: bytes,
        partition: int,
        leader_epoch: int,
        state: PartitionState,
        storage: Storage,
        config: LogConfig,
        clock: Clock,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.first_stream = state.meta.stream.stream_id
        """Id of its meta stream: the partition's number in the metadata."""
        self.came_at = -math.inf
        """Monotonic seconds at which it came here from a living owner, if it did."""
        self._state = state
        self._storage = storage
        self._clock = clock
        self._closed = False
        self._last_wal_end = 0
        self._unconfirmed: deque[tuple[int, int]] | None = None
        self._watchers: dict[object, Callable[[], None]] | None = None
        self._on_confirmed = self._confirmed
        self._start = state.log_start
        self._start_wal_end = 0
        self._trimmer = Trimmer(state, storage)
        self.config = config

    @classmethod
    async def open(
        cls,
        *,
        topic: str,
        topic_id: bytes,
        partition: int,
        leader_epoch: int,
        streams: tuple[OpenedStream, OpenedStream, OpenedStream, OpenedStream],
        storage: Storage,
        manager: StreamManager,
        config: LogConfig,
        clock: Clock,
        tails: Mapping[int, Sequence[StreamRecord]] | None = None,
    ) -> PartitionLog:
        """Open the log on its four opened streams (meta, data, time, txn), recovering it if it was not closed cleanly.

        `tails` holds committed records by stream id that need not be read (`ClosedLog.tails` of the owner before).

        What the WAL holds of the streams counts as confirmed: storage recovers it before it is opened.
        Raises `StreamQuarantined`, `CorruptData`, `Unavailable`.
        """
        try:
            meta, data, time, txn = (Stream.open(opened, storage, manager) for opened in streams)
            for stream_id, records in (tails or {}).items():
                storage.warm(stream_id, records)
            state = PartitionState(MetaStream(meta), data, TimeIndex(time), TxnIndex(txn))
            scanned = await recover(state, config, clock.time_ms())
        except BaseException:  # whatever it was: the next try opens them anew
            for opened in streams:
                storage.close_stream(opened.stream_id)
            raise
        if scanned:
            log.info(
                "partition recovered after an unclean stop",
                extra={"topic": topic, "partition": partition, "batches_scanned": scanned},
            )
        state.epochs.assign(leader_epoch, data.next_offset)
        state.epochs.truncate_start(state.log_start)
        state.high_watermark = data.next_offset
        return cls(
            topic=topic,
            topic_id=topic_id,
            partition=partition,
            leader_epoch=leader_epoch,
            state=state,
            storage=storage,
            config=config,
            clock=clock,
        )

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> LogConfig:
        """The effective configuration; may be replaced at any time."""
        return self._config

    @config.setter
    def config(self, config: LogConfig) -> None:
        self._config = config
        self._log_append_time = config.timestamp_type == "LogAppendTime"
        self._compacts = config.compacts
        self._codec = _CODECS.get(config.compression_type)

    @property
    def log_start_offset(self) -> int:
        """First offset that can be read: the confirmed one, for an unconfirmed one may be taken back."""
        return self._start

    @property
    def high_watermark(self) -> int:
        """Offset after the last confirmed record."""
        return self._state.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Offset up to which all transactions are decided; ≤ high watermark."""
        return self._state.last_stable_offset

    @property
    def log_end_offset(self) -> int:
        """What the next record gets."""
        return self._state.data.next_offset

    @property
    def closed(self) -> bool:
        """Whether the log serves no more."""
        return self._closed

    def size_bytes(self) -> int:
        """Bytes of the batches in all segments."""
        return sum(segment.size_bytes for segment in self._state.segments)

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """`(largest epoch ≤ epoch, its end offset)`, `(-1, -1)` if unknown. See `LeaderEpochs.end_offset`."""
        return self._state.epochs.end_offset(epoch, self.log_end_offset)

    def epoch_at(self, offset: int) -> int:
        """Leader epoch that wrote `offset`, or -1."""
        return self._state.epochs.epoch_at(offset)

    def producers(self) -> list[ProducerInfo]:
        """The producers that the partition remembers."""
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

    def add_watermark_listener(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back, on the loop, whenever high watermark, last stable or log start offset moves, and at the close.

        Returns what removes the listener again (any number of times). The callback must be quick and not raise.
        """
        if self._watchers is None:
            self._watchers = {}
        watchers, key = self._watchers, object()
        watchers[key] = callback

        def remove() -> None:
            watchers.pop(key, None)

        return remove

    def tell_listeners(self) -> None:
        """Call back the watermark listeners: what they wait for has become of a closed log."""
        self._notify()

    def _notify(self) -> None:
        if self._watchers:
            for callback in tuple(self._watchers.values()):
                callback()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.topic}-{self.partition} is closed on this broker")

    # --- appending -----------------------------------------------------------------------------------------------

    def append(self, records: memoryview, *, acks_leader_epoch: int | None = None) -> AppendResult:
        """Append what a producer sent: exactly one batch. Never waits; `wal_end` is what to wait for.

        `records` is rewritten in place and kept: the caller must never change it again. A read-only view is copied.
        `acks_leader_epoch` refuses the write unless it is this log's epoch. Raises `InvalidRecord`, `CorruptRecord`,
        `RecordTooLarge`, `UnsupportedCompression`, `InvalidTimestamp`, `OutOfOrderSequence`, `InvalidProducerEpoch`,
        `InvalidTxnState`, `FencedLeaderEpoch`, `UnknownLeaderEpoch`, `Closed`, and the storage's `WalFull`,
        `Overloaded` (retriable, nothing was written) and `WalFailed`.
        """
        self._require_open()
        if acks_leader_epoch is not None and acks_leader_epoch != self.leader_epoch:
            self._refuse_epoch(acks_leader_epoch)
        config = self._config
        header = check_batch(records, limit_bytes=config.max_message_bytes)
        if header.producer_id >= 0:
            original = self._state.producers.check(header)
            if original is not None:
                return self._duplicate(original)
        now_ms = self._clock.time_ms()
        if not self._log_append_time:
            _check_timestamps(header, now_ms, config)
        if self._compacts:
            _require_keys(records, header)
        if self._codec is not None and header.compression != self._codec:
            records = memoryview(repack(records, self._codec))
            header = parse_header(records)
        elif records.readonly:
            records = memoryview(bytearray(records))
        return self._append(records, header, now_ms, None if self._log_append_time else header.crc)

    def append_internal(self, batch: bytes | bytearray | memoryview) -> AppendResult:
        """Append one batch of the broker's own (group and transaction records, markers), built by `build_batch`.

        Control batches are taken, size and keys are not checked. Raises as `append`, and `FencedCoordinator`.
        """
        self._require_open()
        view = memoryview(batch)
        if view.readonly:
            view = memoryview(bytearray(batch))
        header = parse_header(view)
        assert header.size_bytes == len(view)
        assert header.last_offset_delta == header.count - 1
        now_ms = self._clock.time_ms()
        if not header.is_control:
            return self._append(view, header, now_ms)
        record = next(iter_records(view, header=header))
        self._state.producers.check_marker(header, control_epoch(record))
        return self._append(view, header, now_ms)

    def _append(self, view: memoryview, header: BatchHeader, now_ms: int, batch_crc: int | None = None) -> AppendResult:
        """`batch_crc`: the batch has just passed its check against this CRC32C and is written as it is."""
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
        elif state.bytes_since_checkpoint >= config.checkpoint_bytes:
            state.checkpoint()
        if state.txn.waiting:
            state.txn.flush()
        data = state.data
        base = data.next_offset
        _OFFSET.pack_into(view, 0, base)
        _EPOCH.pack_into(view, 12, self.leader_epoch)
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
            base, base + header.last_offset_delta, log_append_time, self._start, wal_end, duplicate=False
        )

    def _end_transaction(self, header: BatchHeader, view: memoryview, base: int, now_ms: int, wal_end: int) -> int:
        aborted = apply_marker(self._state, header, view, base, now_ms)
        return wal_end if aborted is None else max(wal_end, self._state.note_aborted(aborted))

    def _duplicate(self, original: BatchEntry) -> AppendResult:
        state = self._state
        # It may have been appended a moment ago and not be durable yet: what was appended last covers it.
        wal_end = 0 if original.last_offset < state.high_watermark else self._last_wal_end
        return AppendResult(
            original.base_offset,
            original.last_offset,
            original.timestamp if self._log_append_time else -1,
            self._start,
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

    # --- reading -------------------------------------------------------------------------------------------------

    def _read_bound(self, offset: int, *, committed: bool) -> int:
        self._require_open()
        state = self._state
        if not self._start <= offset <= state.data.next_offset:
            raise OffsetOutOfRange(
                f"offset {offset} of {self.topic}-{self.partition} is outside {self._start}..{self.log_end_offset}"
            )
        return state.last_stable_offset if committed else state.high_watermark

    def read_hot(self, offset: int, max_bytes: int, *, committed: bool) -> FetchResult | None:
        """As `read` with `minimum_one`, from memory and at once; None if it takes a read from the bucket."""
        bound = self._read_bound(offset, committed=committed)
        if offset >= bound:
            return FetchResult([], [], 0)
        found = self._state.data.read_hot(offset, bound, max_bytes)
        if found is None:
            return None
        if not committed:
            return _fetched(found, [])
        aborted = self._state.txn.lookup_hot(offset, _end(found))
        return None if aborted is None else _fetched(found, [(one.producer_id, one.first_offset) for one in aborted])

    async def read(self, offset: int, max_bytes: int, *, committed: bool, minimum_one: bool = True) -> FetchResult:
        """Whole batches from the one that contains `offset`, up to `max_bytes` and the bound of the isolation level.

        The first batch comes even when it is larger than `max_bytes`, unless `minimum_one` is off. Empty at the bound.
        Raises `OffsetOutOfRange`, `Closed`, `CorruptData`, `Unavailable`.
        """
        bound = self._read_bound(offset, committed=committed)
        if offset >= bound:
            return FetchResult([], [], 0)
        try:
            found = await self._state.data.read(offset, bound, max_bytes)
        except OffsetTrimmed as error:  # retention was quicker
            raise OffsetOutOfRange(error.message) from error
        if not minimum_one and len(found[0].payload) > max_bytes:
            return FetchResult([], [], 0)
        if not committed:
            return _fetched(found, [])
        aborted = await self._state.txn.lookup(offset, _end(found))
        return _fetched(found, [(one.producer_id, one.first_offset) for one in aborted])

    async def offset_for_timestamp(self, timestamp_ms: int, *, committed: bool = False) -> TimestampOffset | None:
        """`(offset, timestamp, leader epoch)` of the first visible record at or after `timestamp_ms`, or None.

        Raises `Closed`, `CorruptData`, `Unavailable`.
        """
        self._require_open()
        bound = self.last_stable_offset if committed else self.high_watermark
        return await first_at_or_after(self._state, timestamp_ms, bound)

    async def offset_of_max_timestamp(self) -> TimestampOffset | None:
        """`(offset, timestamp, leader epoch)` of the first record with the largest timestamp, or None. Raises alike."""
        self._require_open()
        await self._storage.confirm.wait(self._last_wal_end)
        return await largest(self._state, self.high_watermark)

    # --- housekeeping --------------------------------------------------------------------------------------------

    async def delete_records(self, before_offset: int) -> int:
        """Give up all records before `before_offset` (-1: the high watermark); the new log start, durable.

        Raises `OffsetOutOfRange` past the high watermark, `Closed`, `Overloaded`, `WalFull`.
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
        if self._start < target:  # closed while an earlier trim was on its way: nothing has moved
            self._require_open()
        return self._start

    async def apply_retention(self) -> int:
        """Drop segments by age and size, forget silent producers, keep the meta stream small; the new log start.

        To be called every few minutes. Raises `Closed`, `Overloaded`, `WalFull`; what failed is tried again next time.
        """
        self._require_open()
        state, now_ms = self._state, self._clock.time_ms()
        state.producers.expire(now_ms, self._config.producer_id_expiration_ms)
        if state.bytes_since_checkpoint >= _HOUSEKEEPING_CHECKPOINT_BYTES:
            state.checkpoint()
        start = retention_start(
            state.segments, state.log_start, state.high_watermark, self.log_end_offset, now_ms, self._config
        )
        await self._move_start(start)
        if not self._closed:
            await self._trimmer.compact_meta()
        return self._start

    async def _move_start(self, offset: int) -> None:
        """Return when a log start of `offset` at least is confirmed, or the log is closed."""
        await self._trimmer.trim()
        state = self._state
        if offset <= self._start or self._closed:
            return
        if offset > state.log_start:
            self._start_wal_end = state.move_start(offset, self._clock.time_ms())
            self._trimmer.start_moved(self._start_wal_end)
            self._storage.confirm.add_listener(self._start_wal_end, partial(self._start_confirmed, offset))
        await self._storage.confirm.wait(self._start_wal_end)
        await self._trimmer.trim()

    def _start_confirmed(self, offset: int) -> None:
        self._start = max(self._start, offset)
        self._notify()

    async def close(self) -> None:
        """Close cleanly: no more appends, then a checkpoint with the clean flag, durable. Closing twice is success.

        Raises `Overloaded`, `WalFull`, `WalFailed` if the checkpoint cannot be written; the log is closed all the same,
        and the next opening scans.
        """
        if not self._closed:
            await self._close(self._checkpoint_if_dirty)

    async def close_for_move(self) -> ClosedLog:
        """As `close`, and the meta stream is written anew as its last record: all that another broker has to read.

        Everything up to `storage.confirm.value` must be uploaded before the streams are handed over.
        """
        assert not self._closed
        meta, data = self._state.meta, self._state.data
        meta_start = meta.stream.start_offset
        tails: dict[int, list[StreamRecord]] = {}

        def write() -> int:
            nonlocal meta_start
            wal_end = self._checkpoint_if_dirty()
            if meta.items():
                meta_start, wal_end = meta.rewrite()
            tails[meta.stream.stream_id] = _from(meta_start, meta.stream.tail(META_TAIL_BYTES))
            tails[data.stream_id] = data.tail(DATA_TAIL_BYTES)
            return wal_end

        await self._close(write)
        meta_end, data_end, time_end, txn_end = (stream.next_offset for stream in self._streams())
        return ClosedLog((meta_end, data_end, time_end, txn_end), meta_start, tails)

    def _checkpoint_if_dirty(self) -> int:
        return self._state.checkpoint(clean=True) if self._state.dirty else self._last_wal_end

    async def _close(self, write: Callable[[], int]) -> None:
        self._closed = True
        self._notify()
        try:
            self._last_wal_end = await self._when_there_is_room(write)
        finally:
            try:  # whoever opens the streams next takes all that is in them for confirmed
                await self._storage.confirm.wait(self._last_wal_end)
            finally:
                await self._close_streams()

    async def _when_there_is_room(self, write: Callable[[], int]) -> int:
        refused: Overloaded | None = None
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
                while True:
                    try:
                        return write()
                    except Overloaded as error:
                        refused = error
                    await self._storage.writable()
                    await asyncio.sleep(0)
        except TimeoutError:
            assert refused is not None
            raise refused from None

    async def drop(self) -> None:
        """The topic was deleted: stop serving; nothing that is not uploaded needs to be."""
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


def _check_timestamps(header: BatchHeader, now_ms: int, config: LogConfig) -> None:
    """CreateTime within the topic's bounds, as the header tells it."""
    if header.max_timestamp - now_ms > config.message_timestamp_after_max_ms:
        raise InvalidTimestamp(
            f"timestamp {header.max_timestamp} is over {config.message_timestamp_after_max_ms} ms ahead of {now_ms}",
            hint="check the producer's clock, or message.timestamp.after.max.ms",
        )
    if header.base_timestamp >= 0 and now_ms - header.base_timestamp > config.message_timestamp_before_max_ms:
        raise InvalidTimestamp(
            f"timestamp {header.base_timestamp} is over {config.message_timestamp_before_max_ms} ms before {now_ms}",
            hint="check the producer's clock, or message.timestamp.before.max.ms",
        )


def _require_keys(batch: memoryview, header: BatchHeader) -> None:
    """Every record of a compacted topic has a key."""
    bad = [index for index, record in enumerate(iter_records(batch, header=header)) if record.key is None]
    if bad:
        why = "Compacted topic cannot accept message without key"
        raise InvalidRecord(
            "one or more records have been rejected: a compacted topic needs keys",
            record_errors=[(index, why) for index in bad[:_MAX_RECORD_ERRORS]],
        )


def _from(offset: int, records: list[StreamRecord]) -> list[StreamRecord]:
    """The records from `offset` on, or none if one of them is missing."""
    kept = [record for record in records if record.base_offset >= offset]
    return kept if kept and kept[0].base_offset == offset else []


def _end(found: list[StreamRecord]) -> int:
    last = found[-1]
    return last.base_offset + last.count


def _fetched(found: list[StreamRecord], aborted: list[tuple[int, int]]) -> FetchResult:
    records = [record.payload for record in found]
    return FetchResult(records, aborted, sum(map(len, records)))
