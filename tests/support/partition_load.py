"""An idempotent producer over many partitions that notes when each of them was acknowledged last, and what was.

    with PartitionLoad(bootstrap, "orders", 24) as load:
        load.begin_round()
        ...
        gap_s = max(load.gaps_s().values())
    load.verify(bootstrap)

Each record carries its number within its partition. `verify` reads everything and holds it against what was
acknowledged: every record at its offset, none twice, in order, offsets contiguous.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition

DEADLINE_S = 120.0


class PartitionLoad:
    """See the module. `pause_s` lies between two records of a partition. Methods are for the thread that made it."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, pause_s: float = 0.01) -> None:
        self.topic = topic
        self.partitions = partitions
        self.errors: list[str] = []
        self._acknowledged: list[dict[int, int]] = [{} for _ in range(partitions)]  # number → offset
        self._last = [0.0] * partitions
        self._longest = [0.0] * partitions
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "log_level": 0,  # it would report every connection that is refused
                "enable.idempotence": True,
                "linger.ms": 2,
                "retry.backoff.ms": 10,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 100,
            }
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        if kind is None:
            assert not self._thread.is_alive(), "records without an outcome"

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            due = time.monotonic() + self._pause_s
            for partition in range(self.partitions):
                self._send(partition, number)
            number += 1
            while (left_s := due - time.monotonic()) > 0:
                self._producer.poll(left_s)  # returns at the first delivery
            self._producer.poll(0)
        self._producer.flush(DEADLINE_S - 10)

    def _send(self, partition: int, number: int) -> None:
        while True:
            try:
                self._producer.produce(
                    self.topic, b"%d" % number, partition=partition, on_delivery=self._noting(partition, number)
                )
                return
            except BufferError:
                self._producer.poll(0.05)

    def _noting(self, partition: int, number: int) -> Callable[[KafkaError | None, Message], None]:
        def done(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self.errors.append(f"partition {partition}, record {number}: {error}")
                return
            now = time.monotonic()
            with self._lock:
                self._longest[partition] = max(self._longest[partition], now - self._last[partition])
                self._last[partition] = now
                self._acknowledged[partition][number] = message.offset()

        return done

    def begin_round(self) -> None:
        """Measure gaps from now on."""
        now = time.monotonic()
        with self._lock:
            self._longest = [0.0] * self.partitions
            self._last = [now] * self.partitions

    def gaps_s(self) -> dict[int, float]:
        """The longest time between two acknowledgements of each partition since the round began, until now."""
        now = time.monotonic()
        with self._lock:
            return {
                partition: max(longest, now - last)
                for partition, (longest, last) in enumerate(zip(self._longest, self._last, strict=True))
            }

    def count(self) -> int:
        """Acknowledged records."""
        with self._lock:
            return sum(map(len, self._acknowledged))

    def fewest(self) -> int:
        """Acknowledged records of the partition that has fewest."""
        with self._lock:
            return min(map(len, self._acknowledged))

    def wait_grown(self, by: int = 20, timeout_s: float = 60.0) -> None:
        """Until every partition has so many more acknowledgements. Raises `AssertionError`."""
        with self._lock:
            targets = [len(each) + by for each in self._acknowledged]
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                missing = [at for at, each in enumerate(self._acknowledged) if len(each) < targets[at]]
            if not missing:
                return
            assert time.monotonic() < deadline, f"partitions {missing} get no acknowledgements"
            time.sleep(0.02)

    def verify(self, bootstrap: str) -> list[str]:
        """What is wrong, if anything. Call it after the load has ended."""
        assert not self._thread.is_alive()
        problems = list(self.errors[:20])
        consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "verify", "enable.auto.commit": False, "check.crcs": True}
        )
        try:
            for partition in range(self.partitions):
                problems += self._verify_partition(consumer, partition)
        finally:
            consumer.close()
        return problems

    def _verify_partition(self, consumer: Consumer, partition: int) -> list[str]:
        where = f"{self.topic}-{partition}"
        low, end = consumer.get_watermark_offsets(TopicPartition(self.topic, partition), timeout=60)
        consumer.assign([TopicPartition(self.topic, partition, OFFSET_BEGINNING)])
        numbers: list[int] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(numbers) < end:
            if time.monotonic() > deadline:
                return [f"{where} is readable up to {len(numbers)} only, its end is {end}"]
            for message in consumer.consume(5000, 0.5):
                if message.error() is not None:
                    return [f"{where}: {message.error()}"]
                if message.offset() != len(numbers):
                    return [f"{where}: offset {message.offset()} where {len(numbers)} was due"]
                numbers.append(int(message.value() or b"-1"))
        acknowledged = self._acknowledged[partition]
        problems = [f"{where} begins at {low}"] if low else []
        if numbers != list(range(len(numbers))):
            problems.append(f"{where}: its {len(numbers)} records are not the numbers from 0 on, in order, once each")
        lost = [number for number, offset in acknowledged.items() if offset >= end or numbers[offset] != number]
        if lost:
            problems.append(f"{where}: {len(lost)} acknowledged records are not where they were, e.g. {lost[:5]}")
        return problems
