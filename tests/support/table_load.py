"""Records of a topic that becomes tables, and what the tables must have of them.

Everything about a record follows from its partition and its number there: its producer is idempotent and alone, so the
number is its offset. Some values do not fit, are null or have no key; a new field comes later.

Entry: `TableLoad`, `as_rows`, `as_latest`, `Record`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition

Row = dict[str, Any]
Place = tuple[int, int]
"""Partition and offset."""
KEYS = 50
"""Of each partition."""
BEGAN_MS = 1_700_000_000_000
LATE = 150
"""The number from which on records have the field `late`."""
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Record:
    """One record."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None

    @property
    def timestamp_ms(self) -> int:
        return BEGAN_MS + self.offset

    @property
    def place(self) -> Place:
        return self.partition, self.offset

    @property
    def is_bad(self) -> bool:
        """Whether the value does not fit: no JSON, or another type than the column's."""
        return self.offset % 17 in (3, 5)


def record(partition: int, number: int) -> Record:
    """The record with a number in a partition."""
    key = b"%d-%d" % (partition, number * 7 % KEYS) if number % 13 else None
    fields: Row = {"id": number, "name": f"n{number % 1_000}", "more": {"x": number / 2, "tags": ["a", None]}}
    if number >= LATE:
        fields["late"] = f"late {number}"
    if number % 17 == 5:
        fields["id"] = "no number"
    value: bytes | None = json.dumps(fields).encode()
    if number % 17 == 3:
        value = b'{"id": %d, "name' % number
    elif number % 17 == 7:
        value = None
    return Record(partition, number, key, value)


def as_row(topic: str, one: Record) -> Row:
    """What a table has of a record that fits."""
    fields = json.loads(one.value) if one.value is not None else {}
    return {
        "_topic": topic,
        "_partition": one.partition,
        "_offset": one.offset,
        "_timestamp": datetime.fromtimestamp(one.timestamp_ms / 1_000, UTC),
        "_key": one.key,
        **{name: fields.get(name) for name in ("id", "name", "more", "late")},
    }


def as_rows(records: Iterable[Record]) -> tuple[dict[Place, Record], dict[Place, Record]]:
    """What a table of every record has, and its quarantine."""
    found: tuple[dict[Place, Record], dict[Place, Record]] = {}, {}
    for one in records:
        found[one.is_bad][one.place] = one
    return found


def as_latest(records: Iterable[Record]) -> tuple[dict[Place, Record], dict[Place, Record]]:
    """What a table of each key's last record has, and its quarantine. `records` are in the order of offsets."""
    latest: dict[bytes, Record] = {}
    bad: dict[Place, Record] = {}
    for one in records:
        if one.is_bad or one.key is None:
            bad[one.place] = one
        elif one.value is None:
            latest.pop(one.key, None)
        else:
            latest[one.key] = one
    return {one.place: one for one in latest.values()}, bad


class TableLoad:
    """An idempotent producer in a thread, at a rate (records per second, of all partitions together).

    After the `with` statement everything is acknowledged; `counts` are the partitions' records.
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int, rate: float) -> None:
        self.topic = topic
        self.counts = [0] * partitions
        self.errors: list[str] = []
        self._rate = rate
        self._bootstrap = bootstrap
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "log_level": 0, "enable.idempotence": True, "linger.ms": 20}
        )

    def send(self, count: int) -> None:
        """Send so many more records to each partition. Not while the thread runs."""
        for partition, first in enumerate(self.counts):
            for number in range(first, first + count):
                self._send(partition, number)
            self.counts[partition] = first + count

    def flush(self) -> None:
        """Wait until all is acknowledged. Raises `AssertionError`."""
        assert self._producer.flush(DEADLINE_S) == 0, "records without an acknowledgement"
        assert not self.errors, self.errors[:5]

    def _send(self, partition: int, number: int) -> None:
        one = record(partition, number)
        self._producer.produce(
            self.topic,
            partition=partition,
            key=one.key,
            value=one.value,
            timestamp=one.timestamp_ms,
            on_delivery=self._delivered,
        )
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self.errors.append(str(error))

    def _run(self) -> None:
        while not self._stopping.wait(len(self.counts) / self._rate):
            self.send(1)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)

    def read(self) -> list[Record]:
        """What the topic has, as a consumer reads it: each partition in the order of its offsets."""
        consumer = Consumer({"bootstrap.servers": self._bootstrap, "group.id": "reader", "enable.auto.commit": False})
        found: list[Record] = []
        left = dict(enumerate(self.counts))
        deadline = time.monotonic() + DEADLINE_S
        try:
            consumer.assign([TopicPartition(self.topic, at, OFFSET_BEGINNING) for at in left])
            while any(count > 0 for count in left.values()):
                assert time.monotonic() < deadline, f"not read within {DEADLINE_S:g} s: {left}"
                for message in consumer.consume(5_000, 0.5):
                    assert message.error() is None, message.error()
                    partition, offset = message.partition(), message.offset()
                    assert partition is not None and offset is not None
                    found.append(Record(partition, offset, message.key(), message.value()))
                    left[partition] -= 1
        finally:
            consumer.close()
        return sorted(found, key=lambda one: one.place)
