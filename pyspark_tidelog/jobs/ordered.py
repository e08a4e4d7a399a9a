"""Copies one partition in the order of its records, by one writer, so that a later run can go on where this one ended.

There are two ways. *Preserving offsets*, each record gets the offset that it has at the source; so the target's end is
where a later run goes on. An offset without a record (a leading one that retention has removed, one that compaction has
removed, a transaction's marker) is a hole, which is refused or filled with a record without key and value and with the
header `FILLER`. *Renumbering*, records get consecutive offsets from 0; the target's end is the number of records that a
later run leaves out.

Invariants:
- a record is handed to the producer only when all before it are; the producer is idempotent and ends with an error
  rather than leave out one in the middle;
- every acknowledgement has the offset that was meant, and at the end the target ends there: else somebody else writes
  to the target, and the copy fails;
- before anything is written to a partition that has records, its last record, and its first when renumbering, are
  those of the source.

Two attempts of one copy at a time would write over each other; each sees it by the offsets, and fails.

Entry: `copy_partition`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark_tidelog.sink import REFUSED
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

FILLER = "tidelog.backfill.hole"
"""Header of a record that stands for an offset without a record at the source."""
MAX_RECORD_BYTES = 100_000_000
"""Larger than what any broker accepts: the target's max.message.bytes decides."""
QUEUE_KIB = 64 << 10
DRAIN_S = 5.0
_REFUSALS = {10: "see max.message.bytes of the target", **{code: hint for code, (_, hint) in REFUSED.items()}}
"""By Kafka's code: what is to be done about a record that the target never takes."""
GONE_S = 5.0
"""So long a partition has to be absent from the metadata to be taken for deleted."""
ACKNOWLEDGED_S = 300.0
"""A record that no broker acknowledged for so long fails the copy."""
ANSWER_S = 60.0
_PRODUCER = {
    "log_level": 0,
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    "acks": "all",
    "linger.ms": 20,
    "compression.type": "lz4",
    "message.max.bytes": MAX_RECORD_BYTES,
    "queue.buffering.max.kbytes": max(QUEUE_KIB, 2 * (MAX_RECORD_BYTES >> 10)),
    "queue.buffering.max.messages": 100_000,
    "message.timeout.ms": int(ACKNOWLEDGED_S * 1000),
}

Headers = list[tuple[str, bytes | None]]
Source = Callable[[int], Iterable["pa.RecordBatch"]]
"""Returns the source's records from an offset on, in order, as rows of the data source with headers."""


class Record(NamedTuple):
    """One record."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Headers | None


@dataclass(frozen=True)
class PartitionCopy:
    """What is to be copied. Pickled to an executor."""

    source: str
    """Name of the source's topic, for messages."""
    topic: str
    partition: int
    """Of the target; and of the source."""
    start: int
    """The first offset of the source that exists, or is wanted."""
    end: int
    """The source's offset after the last one that is wanted."""
    keeps_offsets: bool
    fills_holes: bool = False
    kafka: Mapping[str, str] | None = None
    """Settings of the client of the target, `bootstrap.servers` among them."""

    @property
    def place(self) -> str:
        """Name the target, for messages."""
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True)
class CopiedPartition:
    """What was done."""

    partition: int
    copied: int
    """Records."""
    found: int
    """Offsets of the target that an earlier run had written."""
    filled: int
    end: int
    """The target's end."""
    restamped: int
    """Records with timestamp 0, for which the client writes the time of the copy."""


def records_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Record]:
    """Return the rows of the data source as records."""
    import pyarrow as pa

    for batch in batches:
        columns = {name: batch.column(name) for name in batch.schema.names}
        stamps = columns["timestamp"].cast(pa.timestamp("us", columns["timestamp"].type.tz)).cast(pa.int64())
        headers = columns["headers"].to_pylist() if "headers" in columns else [None] * batch.num_rows
        rows = zip(
            columns["offset"].to_pylist(),
            columns["key"].to_pylist(),
            columns["value"].to_pylist(),
            stamps.to_pylist(),
            headers,
            strict=True,
        )
        for offset, key, value, stamp, pairs in rows:
            named = [(pair["key"], pair["value"]) for pair in pairs] if pairs else None
            yield Record(offset, key, value, stamp // 1_000, named)


def copy_partition(copy: PartitionCopy, source: Source) -> CopiedPartition:
    """Copy what the target does not have yet. Safe to be called again after any end of an earlier call.

    Raises `InvalidInput` for a hole and for a target that has something else, `Unavailable`, and what `source` raises.
    """
    target = TargetPartition(copy)
    try:
        low, end = target.bounds()
        rows = _kept(copy, source, target, low, end) if copy.keeps_offsets else _left(copy, source, target, low, end)
        writer = OrderedWriter(copy, end)
        try:
            for record in rows:
                writer.write(record)
            writer.finish()
        finally:
            writer.close()
        low, now = target.bounds()
        if now != writer.next_offset:
            raise _other_writer(copy, f"it ends at offset {now}, and not at {writer.next_offset}")
        if copy.keeps_offsets and low < min(copy.start, now):
            target.delete_before(min(copy.start, now))
    finally:
        target.close()
    return CopiedPartition(copy.partition, writer.copied, end, writer.filled, now, writer.restamped)


def _other_writer(copy: PartitionCopy, what: str) -> InvalidInput:
    return InvalidInput(
        f"{copy.place} has another writer beside this copy: {what}",
        hint=f"stop it, delete topic {copy.topic}, and begin anew",
    )


def _differs(copy: PartitionCopy, offset: int, what: str) -> InvalidInput:
    return InvalidInput(
        f"{copy.place} is no copy of {copy.source} that could go on: the record at its offset {offset} {what}",
        hint="name a target that is empty, or has what an earlier run with the same arguments left",
    )


def _kept(copy: PartitionCopy, source: Source, target: TargetPartition, low: int, end: int) -> Iterator[Record]:
    """Return what is to be written from offset `end` on, fillers included. Raises `InvalidInput`."""
    if end > copy.end:
        raise _differs(copy, copy.end, f"is behind the source's end; the target ends at {end}")
    begin = max(copy.start, end - 1)  # the last record that is there is compared
    rows = iter(records_of(source(begin)) if begin < copy.end else ())
    record = next(rows, None)
    if end:
        is_record = record is not None and record.offset == end - 1
        _compare(copy, target, low, end - 1, record if is_record else None)
        record = next(rows, None) if is_record else record
    at, stamp = end, 0
    while record is not None:
        yield from _fillers(copy, at, record.offset, record.timestamp_ms)
        yield record
        at, stamp = record.offset + 1, record.timestamp_ms
        record = next(rows, None)
    yield from _fillers(copy, at, copy.end, stamp)


def _fillers(copy: PartitionCopy, start: int, end: int, timestamp_ms: int) -> Iterator[Record]:
    if start < end and not copy.fills_holes:
        raise InvalidInput(
            f"{copy.source}-{copy.partition}: offset {start} has no record (retention, compaction or a transaction"
            f" removed it), the next one that has is {end}: offsets cannot be preserved",
            hint="--fill-holes writes a record without key and value there; --renumber gives up the offsets",
        )
    for offset in range(start, end):
        yield Record(offset, None, None, timestamp_ms, [(FILLER, None)])


def _left(copy: PartitionCopy, source: Source, target: TargetPartition, low: int, end: int) -> Iterator[Record]:
    """Return the source's records behind the first `end` ones, which the target has. Raises `InvalidInput`."""
    number = 0
    for record in records_of(source(copy.start)):
        if number >= end:
            yield record
        elif number == end - 1 or (number == 0 and low == 0):
            _compare(copy, target, low, number, record)
        number += 1
    if number < end:
        raise _differs(copy, number, f"is behind the source's end; the source has {number} records")


def _compare(copy: PartitionCopy, target: TargetPartition, low: int, offset: int, wanted: Record | None) -> None:
    """Raise `InvalidInput` unless the target has this record at `offset`; None: a filler."""
    if offset < low:
        if wanted is None and offset < copy.start:
            return  # fillers of what the source does not have any more are deleted in the end
        raise _differs(
            copy, offset, "was deleted, and cannot be compared: see retention.ms of the target, and the records' times"
        )
    found = target.read(offset)
    if wanted is None:
        if found is None or not _is_filler(found):
            raise _differs(copy, offset, "does not exist at the source")
        return
    if found is None or found[1:3] != wanted[1:3] or (found.headers or None) != (wanted.headers or None):
        raise _differs(copy, offset, f"is not the source's at offset {wanted.offset}")
    if wanted.timestamp_ms not in (0, found.timestamp_ms):
        raise _differs(copy, offset, f"has timestamp {found.timestamp_ms} instead of {wanted.timestamp_ms}")


def _is_filler(record: Record) -> bool:
    return bool(record.headers) and record.headers == [(FILLER, None)]


class TargetPartition:
    """The target as a reader sees it."""

    def __init__(self, copy: PartitionCopy) -> None:
        from confluent_kafka import Consumer

        self._copy = copy
        self._consumer = Consumer(
            {
                "log_level": 0,
                **(copy.kafka or {}),
                "group.id": "tidelog-spark-copy",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "allow.auto.create.topics": False,
            }
        )

    def bounds(self) -> tuple[int, int]:
        """Return the first offset and the one after the last. Raises `Unavailable`, `NotFound`.

        While its leader changes, a partition is not known for a moment: only one that stays so is not there.
        """
        from confluent_kafka import KafkaException, TopicPartition

        place = TopicPartition(self._copy.topic, self._copy.partition)
        began_s, told, absent_s = time.monotonic(), "no answer", None
        while time.monotonic() - began_s < ANSWER_S:
            try:
                low, high = self._consumer.get_watermark_offsets(place, timeout=10.0)
            except KafkaException as error:
                told = error.args[0].str()
            else:
                return int(low), int(high)
            if self._is_there():
                absent_s = None
            elif absent_s is None:
                absent_s = time.monotonic()
            elif time.monotonic() - absent_s > GONE_S:
                raise NotFound(f"there is no {self._copy.place}")
            time.sleep(0.2)
        raise Unavailable(f"the offsets of {self._copy.place} are not known: {told}", hint="run it again")

    def _is_there(self) -> bool:
        from confluent_kafka import KafkaException

        try:
            known = self._consumer.list_topics(self._copy.topic, timeout=10.0).topics[self._copy.topic]
        except KafkaException:
            return True  # nobody tells
        return self._copy.partition in known.partitions

    def read(self, offset: int) -> Record | None:
        """Return a record; None if there is none at this offset. Raises `Unavailable`."""
        from confluent_kafka import TopicPartition

        self._consumer.assign([TopicPartition(self._copy.topic, self._copy.partition, offset)])
        ends_s, problem = time.monotonic() + ANSWER_S, "no answer"
        while time.monotonic() < ends_s:
            message: Any = self._consumer.poll(1.0)
            if message is None:
                continue
            if message.error() is not None:
                problem = str(message.error())
                continue
            found = message.offset()
            if found != offset:
                return None
            return Record(offset, message.key(), message.value(), message.timestamp()[1], message.headers())
        raise Unavailable(f"offset {offset} of {self._copy.place} cannot be read: {problem}")

    def delete_before(self, offset: int) -> None:
        """Delete the fillers of offsets that the source does not have any more. Raises `Unavailable`."""
        from confluent_kafka import KafkaException, TopicPartition
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"log_level": 0, **(self._copy.kafka or {})})
        place = TopicPartition(self._copy.topic, self._copy.partition, offset)
        try:
            admin.delete_records([place], request_timeout=ANSWER_S)[place].result(ANSWER_S)
        except (KafkaException, TimeoutError) as error:
            raise Unavailable(
                f"the offsets of {self._copy.place} before {offset} cannot be deleted: {error}", hint="run it again"
            ) from error

    def close(self) -> None:
        """Release the connections."""
        self._consumer.close()


class OrderedWriter:
    """The only producer of a partition, while a copy lasts."""

    def __init__(self, copy: PartitionCopy, end: int) -> None:
        from confluent_kafka import Producer

        self._copy = copy
        settings = {**_PRODUCER, **(copy.kafka or {}), "on_delivery": self._delivered}
        self._producer: Any = Producer(settings)
        self._acknowledged = end
        self._problem: TidelogError | None = None
        self._fatal = ""
        self.next_offset = end
        """The offset that the next record gets."""
        self.copied = 0
        self.filled = 0
        self.restamped = 0

    def _poll(self, timeout_s: float) -> None:
        """Hear of acknowledgements, or that the producer has given up."""
        from confluent_kafka import KafkaException

        try:
            self._producer.poll(timeout_s)
        except KafkaException as error:
            self._fatal = self._fatal or str(error.args[0].str())

    def _drain(self) -> None:
        """Hear of all that was handed over, for a while."""
        ends_s = time.monotonic() + DRAIN_S
        while len(self._producer) and time.monotonic() < ends_s:
            self._poll(0.1)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            what = f"{self._copy.place}: the record for offset {self._acknowledged} was not written: {error.str()}"
            if error.code() in _REFUSALS:
                told: TidelogError = InvalidInput(what, hint=_REFUSALS[error.code()])
            else:
                told = Unavailable(what, hint="run it again: it goes on where it ended")
            self._problem = self._problem or told
            return
        offset = message.offset()
        if offset is not None and offset >= 0 and offset != self._acknowledged:
            what = f"the record for offset {self._acknowledged} got offset {offset}"
            self._problem = self._problem or _other_writer(self._copy, what)
        self._acknowledged += 1

    def write(self, record: Record) -> None:
        """Hand a record to the producer, when it has room. Raises `InvalidInput`, `Unavailable`."""
        from confluent_kafka import KafkaException

        while True:
            self._check()
            try:
                self._producer.produce(
                    self._copy.topic,
                    record.value,
                    record.key,
                    self._copy.partition,
                    timestamp=record.timestamp_ms,
                    headers=record.headers,
                )
            except BufferError:
                self._poll(1.0)  # acknowledged, or timed out: it gets room
                continue
            except KafkaException as error:
                self._check()
                raise InvalidInput(
                    f"{self._copy.source}-{self._copy.partition}: the record at offset {record.offset} cannot be"
                    f" written: {error.args[0].str()}"
                ) from error
            break
        self._poll(0)
        self.next_offset += 1
        if _is_filler(record):
            self.filled += 1
        else:
            self.copied += 1
            self.restamped += record.timestamp_ms == 0

    def _check(self) -> None:
        if self._fatal and self._problem is None:
            self._drain()  # a record that failed tells more
            self._problem = self._problem or Unavailable(f"{self._copy.place}: {self._fatal}", hint="run it again")
        if self._problem is not None:
            raise self._problem

    def finish(self) -> None:
        """Wait until all is acknowledged. Raises `InvalidInput`, `Unavailable`."""
        while len(self._producer):
            self._poll(1.0)
            self._check()
        self._check()

    def close(self) -> None:
        """Drop what is not acknowledged, which another attempt writes, and end the producer."""
        self._producer.purge()
        self._drain()
        del self._producer  # it has a callback of this object: only without that circle its threads end now
