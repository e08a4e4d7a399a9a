"""Idempotent producers over many partitions, which note when each of them was acknowledged last, and what was.

    with PartitionLoad(bootstrap, "orders", 24) as load:
        load.begin_round()
        ...
        gap_s = max(load.gaps_s().values())
    load.verify(bootstrap)

The records of a round are sent one after another, evenly over a long pause. Each carries its number within its
partition (`number_of`). What was sent, acknowledged and read is noted in a history; `verify` reads everything, and
holds the history against the checkers (docs/checkers.md). Besides, the offsets of every partition must be contiguous
from 0: one producer for each, without transactions, and nothing is deleted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.support.gaps import Gaps
from tidelog.simulation.checkers import check
from tidelog.simulation.checkers.history import History, Op

DEADLINE_S = 120.0
FLUSH_S = DEADLINE_S - 10
"""Time-out of the end, for what is sent already."""
CLUMP_S = 0.02
"""What is due within this time is sent at once: for every record alone a producer wakes several threads."""
EAGER = {"linger.ms": 2, "retry.backoff.ms": 10, "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 100}
"""Settings of a producer that is to measure the cluster, and not itself."""
_READER, _FIRST_WRITER = 2, 3
_NOT_OURS = -2
"""Stands in the history for a record without a number: nobody sent it."""


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def number_of(value: bytes | None) -> int:
    """The number in a record's value; -1: it has none."""
    return int((value or b"-1").split(b" ", 1)[0])


class PartitionLoad:
    """See the module. `pause_s` lies between two records of a partition, `settings` are librdkafka's.

    `defaults`: none but idempotence is set. Each record has `value_bytes`, if need be more. `pause_s` may be changed at
    any time. The partitions are divided among `producers`, each with a thread of its own: librdkafka has five requests
    in flight to a broker, each for one partition, so that one of them queues where it writes to many.
    Methods are for the thread that made it.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        partitions: int,
        pause_s: float = 0.01,
        settings: Mapping[str, str] | None = None,
        value_bytes: int = 0,
        defaults: bool = False,
        producers: int = 1,
    ) -> None:
        self.topic = topic
        self.partitions = partitions
        self.errors: list[str] = []
        self.history = History(about={"topic": topic, "partitions": partitions})
        self._counts = [0] * partitions
        self._ends = [0] * partitions
        self._gaps = Gaps(partitions)
        self.pause_s = pause_s
        self._value_bytes = value_bytes
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(producers)]
        configured = {
            "bootstrap.servers": bootstrap,
            "log_level": 0,  # it would report every connection that is refused
            "enable.idempotence": True,
            **({} if defaults else EAGER),
            **(settings or {}),
        }
        self._producers = [Producer(configured) for _ in range(producers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "a producer does not end"

    def _run(self, at: int) -> None:
        """Write to every partition of one producer, again and again."""
        producer, number = self._producers[at], 0
        mine = range(at, self.partitions, len(self._producers))
        while not self._stopping.is_set():
            began = time.monotonic()
            for turn, partition in enumerate(mine):
                if (due := began + self.pause_s * turn / len(mine)) > time.monotonic() + CLUMP_S:
                    self._poll_until(producer, due)
                self._send(producer, at, partition, number)
            number += 1
            self._poll_until(producer, began + self.pause_s)
        if left := producer.flush(FLUSH_S):
            self.errors.append(f"{left} records have no outcome after {FLUSH_S:g} s")

    def _poll_until(self, producer: Producer, due: float) -> None:
        while (left_s := due - time.monotonic()) > 0:
            producer.poll(left_s)  # returns at the first delivery
        producer.poll(0)

    def _send(self, producer: Producer, at: int, partition: int, number: int) -> None:
        op = self.history.begin(
            "send",
            _FIRST_WRITER + at,
            _now_us(),
            topic=self.topic,
            partition=partition,
            values=[self._value(partition, number)],
            idempotent=True,
        )
        value = b"%d" % number
        if self._value_bytes:
            value = value.ljust(self._value_bytes)
        while True:
            try:
                producer.produce(self.topic, value, partition=partition, on_delivery=self._noting(op))
                return
            except BufferError:
                producer.poll(0.05)

    def _value(self, partition: int, number: int) -> int:
        """What identifies the record in the history."""
        return number * self.partitions + partition if number >= 0 else _NOT_OURS

    def _noting(self, op: Op) -> Callable[[KafkaError | None, Message], None]:
        def done(error: KafkaError | None, message: Message) -> None:
            partition = op.partition
            if error is not None:
                self.history.end(op, "info", _now_us(), error=str(error))
                self.errors.append(f"partition {partition}, record {op.values[0] // self.partitions}: {error}")
                return
            offset = message.offset()
            self._gaps.note(partition, op.began_us / 1e6)
            known = [offset] if offset is not None and offset >= 0 else []  # a retry's place may not be told
            self.history.end(op, "ok", _now_us(), offsets=known)
            with self._lock:
                self._counts[partition] += 1
                self._ends[partition] = max(self._ends[partition], *(each + 1 for each in known), 0)

        return done

    def begin_round(self) -> None:
        """Measure gaps from now on."""
        self._gaps.begin_round()

    def mark(self) -> None:
        """Note the first acknowledgement of each partition to a record that is sent from now on."""
        self._gaps.mark()

    def acknowledged_s(self, since: float) -> dict[int, float]:
        """By partition: the time from `since` (monotonic seconds) until the acknowledgement that `mark` asks for."""
        return self._gaps.answered_s(since)

    def gaps_s(self) -> dict[int, float]:
        """The longest time between two acknowledgements of each partition since the round began, until now."""
        return self._gaps.longest_s()

    def two_longest_gaps_s(self) -> dict[int, float]:
        """The sum of the two longest times between two acknowledgements of each partition since the round began."""
        return self._gaps.two_longest_s()

    def count(self) -> int:
        """Acknowledged records."""
        with self._lock:
            return sum(self._counts)

    def ends(self) -> dict[int, int]:
        """By partition: the offset behind the last acknowledged record."""
        with self._lock:
            return dict(enumerate(self._ends))

    def fewest(self) -> int:
        """Acknowledged records of the partition that has fewest."""
        with self._lock:
            return min(self._counts)

    def wait_grown(self, by: int = 20, timeout_s: float = 120.0) -> None:
        """Until every partition has so many more acknowledgements. Raises `AssertionError`."""
        with self._lock:
            targets = [count + by for count in self._counts]
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                missing = [at for at, count in enumerate(self._counts) if count < targets[at]]
            if not missing:
                return
            assert time.monotonic() < deadline, f"partitions {missing} get no acknowledgements"
            time.sleep(0.02)

    def verify(self, bootstrap: str) -> list[str]:
        """What is wrong, if anything. Call it after the load has ended."""
        assert not any(thread.is_alive() for thread in self._threads)
        problems = list(self.errors[:20])
        self.history.note("heal", _READER, _now_us())
        consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "verify", "enable.auto.commit": False, "check.crcs": True}
        )
        try:
            for partition in range(self.partitions):
                problems += self._read_partition(consumer, partition)
        finally:
            consumer.close()
        return problems + [finding.text() for finding in check(self.history)[:20]]

    def _list_offsets(self, consumer: Consumer, partition: int) -> tuple[int, int]:
        """Log start and high watermark. librdkafka does not ask again when the leader moves while it asks."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            op = self.history.begin("list_offsets", _READER, _now_us(), topic=self.topic, partition=partition)
            try:
                low, end = consumer.get_watermark_offsets(TopicPartition(self.topic, partition), timeout=60)
            except KafkaException as error:
                self.history.end(op, "fail", _now_us(), error=str(error))
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            self.history.end(op, "ok", _now_us(), log_start=low, high_watermark=end)
            return low, end

    def _read_partition(self, consumer: Consumer, partition: int) -> list[str]:
        where, place = f"{self.topic}-{partition}", {"topic": self.topic, "partition": partition}
        low, end = self._list_offsets(consumer, partition)
        self.history.note("assign", _READER, _now_us(), **place, offset=0)
        consumer.assign([TopicPartition(self.topic, partition, OFFSET_BEGINNING)])
        due = 0
        deadline = time.monotonic() + DEADLINE_S
        while due < end:
            if time.monotonic() > deadline:
                return [f"{where} is readable up to {due} only, its end is {end}"]
            op = self.history.begin("poll", _READER, _now_us(), **place, offset=due)
            offsets, values = [], []
            for message in consumer.consume(min(5000, end - due), 0.5):
                offset = message.offset()
                if message.error() is not None or offset is None:
                    return [f"{where}: {message.error()}"]
                offsets.append(offset)
                values.append(self._value(partition, number_of(message.value())))
            self.history.end(op, "ok", _now_us(), offsets=offsets, values=values)
            if offsets != list(range(due, due + len(offsets))):
                return [
                    f"{where}: offsets from {offsets[0]} to {offsets[-1]} where {due} was due, not one after another"
                ]
            due += len(offsets)
        return [f"{where} begins at {low}"] if low else []
