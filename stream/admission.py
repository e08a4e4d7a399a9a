"""`Admission`: what a producer's batch must satisfy to enter a partition log, and the form in which it enters.

Sans-I/O but for the clock: the batch's sequence against its producer's last ones, its timestamps and keys against the
topic's configuration, its compression. A batch may still be refused by the storage, for want of room or of replicas in
sync; `Admission` remembers when that was, to tell the gap that such a batch leaves from a loss.

Entry: `Admission`.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.batch.batch import (
    BatchHeader,
    Compression,
    CorruptRecord,
    InvalidRecord,
    InvalidTimestamp,
    RecordTooLarge,
    iter_times,
    parse_header,
    repack,
    scan,
    set_max_timestamp,
)
from tidelog.runtime.clock import Clock
from tidelog.stream.errors import EarlierBatchMissing, OutOfOrderSequence
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_state import PartitionState
from tidelog.stream.producer_state import BatchEntry

_CODECS = {
    "uncompressed": Compression.NONE,
    "gzip": Compression.GZIP,
    "snappy": Compression.SNAPPY,
    "lz4": Compression.LZ4,
    "zstd": Compression.ZSTD,
}
_MAX_RECORD_ERRORS = 100
"""Bound of the records without a key that a response names."""
MAX_RECORDS_READ = 65_536
"""Bound of the records that are read for a batch's largest timestamp: the event loop waits for it. Sarama's batches
have fewer, by its own default limit of their bytes."""

MAX_RECORDS_SCANNED = 131_072
"""Bound of the records whose keys are looked at, some 0.2 s. A batch of the default `max.message.bytes` has fewer with
keys, unless it is compressed: then it may have a million."""

MAX_REPACKED_BYTES = 16 << 20
"""Bound of the records of a batch, decompressed, that is compressed anew, unless the topic takes larger batches: the
event loop waits for it, with gzip 0.4 s. A batch of the default `max.message.bytes` may have 64 MiB."""

EARLIER_BATCH_S = 10.0
"""How long after its opening, or after it refused a batch for want of room or replicas, a log takes a gap in a
producer's sequences for a batch that was refused before it."""

MAX_REFUSED = 4096
"""Bound of the producers whose batches found no room; above it the next of every producer counts as sent behind one."""


class _NoRoom(NamedTuple):
    """A batch of a producer that found no room; none that the producer has sent behind it gets that far."""

    at: float
    """Monotonic seconds of its last attempt."""
    end: int
    """The log's end then."""
    epoch: int
    sequence: int


class Admission:
    """The checks of the batches of one log, from its opening on."""

    __slots__ = (
        "_clock",
        "_codec",
        "_compacts",
        "_config",
        "_log_append_time",
        "_no_room",
        "_refused_at",
        "_refused_end",
        "_state",
    )

    def __init__(self, state: PartitionState, config: LogConfig, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._no_room: dict[int, _NoRoom] = {}
        """By producer id, the oldest first."""
        self.configure(config)
        self.note_refused()

    def configure(self, config: LogConfig) -> None:
        """Check by this configuration from now on."""
        self._config = config
        self._log_append_time = config.timestamp_type == "LogAppendTime"
        self._compacts = config.compacts
        self._codec = _CODECS.get(config.compression_type)

    def note_refused(self) -> None:
        """Note that a batch may have been refused that its producer sends again, of whatever producer.

        That is so at the opening, for the time before it, and whenever too few replicas were in sync for a batch, its
        transaction's coordinator was away, it came damaged, or the wait for room took too long.
        """
        self._refused_at, self._refused_end = self._clock.monotonic(), self._state.data.next_offset

    def note_no_room(self, header: BatchHeader) -> None:
        """Note that there was no room for a batch: it waits, and what its producer has sent behind it comes after it.

        This concerns no other producer, nor the batch itself when it is tried again. Where the log is at its bound all
        the time, a producer that is not known here could never go on otherwise.
        """
        if header.producer_id < 0:
            return
        now = self._clock.monotonic()
        self._no_room.pop(header.producer_id, None)
        while self._no_room and now - next(iter(self._no_room.values())).at > EARLIER_BATCH_S:
            del self._no_room[next(iter(self._no_room))]
        if len(self._no_room) >= MAX_REFUSED:
            del self._no_room[next(iter(self._no_room))]
            self.note_refused()
        end = self._state.data.next_offset
        self._no_room[header.producer_id] = _NoRoom(now, end, header.producer_epoch, header.base_sequence)

    def original_of(self, header: BatchHeader) -> BatchEntry | None:
        """Return the batch in the log of which this one of an idempotent producer is a duplicate, or None.

        Raises `InvalidProducerEpoch`, `OutOfOrderSequence`, `EarlierBatchMissing`, `InvalidTxnState`.
        """
        producers = self._state.producers
        try:
            original = producers.check(header)
        except OutOfOrderSequence as error:
            if self._follows_a_refused_batch(header):
                raise EarlierBatchMissing(f"the batch before it is missing: {error.message}") from error
            raise
        is_unknown = header.base_sequence > 0 and producers.get(header.producer_id) is None
        if is_unknown and self._follows_a_refused_batch(header):
            raise EarlierBatchMissing(
                f"producer {header.producer_id}, which is not known here, sent sequence {header.base_sequence}, and may"
                " have sent others before"
            )
        return original

    def _follows_a_refused_batch(self, header: BatchHeader) -> bool:
        """Return whether a batch out of order was sent before its producer learned that one before it was refused.

        A producer sends up to five batches without waiting. While a partition moves, or opens, the WAL is full, or
        replicas are missing, the first may be refused and the next arrive a moment later, when it can be taken. Kafka
        answers OUT_OF_ORDER_SEQUENCE_NUMBER then. librdkafka takes that for a loss and begins a new producer epoch,
        under which it sends again whatever it has no answer for, on other partitions, too: records were doubled by
        that.

        Of a producer that is not known here nothing is out of order. But if its second batch is taken and its first
        one was refused, librdkafka takes the first one for written, and reports success. So that waits, too; a producer
        that goes on here and is forgotten, which is rare, is kept waiting for that time, but not by its own waits for
        room.
        """
        now, sends_ahead = self._clock.monotonic(), self._state.producers.sends_ahead
        if now - self._refused_at <= EARLIER_BATCH_S and sends_ahead(header, self._refused_end):
            return True
        refused = self._no_room.get(header.producer_id)
        if refused is None or now - refused.at > EARLIER_BATCH_S:
            return False
        is_it = (header.producer_epoch, header.base_sequence) == (refused.epoch, refused.sequence)
        return not is_it and sends_ahead(header, refused.end)

    def prepare(self, records: memoryview, header: BatchHeader, now_ms: int) -> tuple[memoryview, BatchHeader]:
        """Check timestamps and keys; return the batch in the topic's compression, writable, and its header.

        `now_ms`: the wall clock. Raises `InvalidTimestamp`, `InvalidRecord`, `CorruptRecord`, `RecordTooLarge`.
        """
        config = self._config
        if header.max_timestamp < header.base_timestamp and not self._log_append_time:
            records, header = _with_max_timestamp(records, header)
        if not self._log_append_time and (
            header.max_timestamp > now_ms + config.message_timestamp_after_max_ms
            or 0 <= header.base_timestamp < now_ms - config.message_timestamp_before_max_ms
        ):
            raise _invalid_timestamp(header, now_ms, config)
        if header.is_log_append_time:  # its records would be read with the batch's time instead of their own
            raise InvalidTimestamp(
                "a producer has marked a record batch with LogAppendTime, which is the broker's to set",
                hint="set message.timestamp.type=LogAppendTime on the topic",
            )
        if self._compacts:
            _require_keys(records, header)
        if self._codec is not None and header.compression != self._codec:
            bound = max(MAX_REPACKED_BYTES, config.max_message_bytes)
            records = memoryview(repack(records, self._codec, config.compression_level, max_bytes=bound))
            _require_size(records, config)
            return records, parse_header(records)
        if records.readonly:
            records = memoryview(bytearray(records))
        return records, header


def _with_max_timestamp(batch: memoryview, header: BatchHeader) -> tuple[memoryview, BatchHeader]:
    """Return a batch that does not tell its largest timestamp with it, as Kafka's brokers do.

    Lookups by time and retention go by it; Sarama before 1.45.1 sends -1.
    """
    if header.count > MAX_RECORDS_READ:
        raise InvalidRecord(
            f"a record batch of {header.count} records tells {header.max_timestamp} for its largest timestamp, which is"
            f" less than its first, {header.base_timestamp}",
            hint="update the client, or let it send smaller batches",
        )
    try:
        largest = max(timestamp for timestamp, _ in iter_times(batch, header))
    except CorruptRecord as error:
        raise InvalidRecord(f"the timestamps of a record batch cannot be read: {error.message}") from error
    if largest < header.base_timestamp:  # it has wrapped around
        raise InvalidRecord(f"the timestamps of a record batch do not go with its first, {header.base_timestamp}")
    if batch.readonly:
        batch = memoryview(bytearray(batch))
    set_max_timestamp(batch, largest)
    return batch, parse_header(batch)


def _invalid_timestamp(header: BatchHeader, now_ms: int, config: LogConfig) -> InvalidTimestamp:
    """Return the error for a CreateTime out of the topic's bounds."""
    if header.max_timestamp > now_ms + config.message_timestamp_after_max_ms:
        return InvalidTimestamp(
            f"timestamp {header.max_timestamp} is over {config.message_timestamp_after_max_ms} ms ahead of {now_ms}",
            hint="check the producer's clock, or message.timestamp.after.max.ms",
        )
    return InvalidTimestamp(
        f"timestamp {header.base_timestamp} is over {config.message_timestamp_before_max_ms} ms before {now_ms}",
        hint="check the producer's clock, or message.timestamp.before.max.ms",
    )


def _require_size(batch: memoryview, config: LogConfig) -> None:
    """Check that a batch which was compressed anew is still within the topic's limit, as in Kafka."""
    if len(batch) > config.max_message_bytes:
        raise RecordTooLarge(
            f"a record batch of {len(batch)} bytes, as {config.compression_type}, exceeds the limit of"
            f" {config.max_message_bytes}",
            hint="send smaller batches, or raise max.message.bytes of the topic",
        )


def _require_keys(batch: memoryview, header: BatchHeader) -> None:
    """Check that every record for a compacted topic has a key, and its place in the batch: compaction goes by both.

    A batch of too many records is told to be too large, upon which Kafka's Java producers split it.
    """
    if header.count > MAX_RECORDS_SCANNED:
        raise RecordTooLarge(
            f"a record batch has {header.count} records, and a compacted topic takes {MAX_RECORDS_SCANNED} in one",
            hint="send smaller batches",
        )
    try:
        records = scan(batch, header)
    except CorruptRecord as error:
        raise InvalidRecord(f"a compacted topic takes no batch that cannot be read: {error.message}") from error
    bad = [index for index, key in enumerate(records.keys) if key is None]
    if bad:
        why = "Compacted topic cannot accept message without key"
        raise InvalidRecord(
            "one or more records have been rejected: a compacted topic needs keys",
            record_errors=[(index, why) for index in bad[:_MAX_RECORD_ERRORS]],
        )
