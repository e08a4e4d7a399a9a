"""An idempotent producer in a thread that knows what it was told, and checks that exactly that is there."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, Message, Producer

from tests.e2e.backends import QUIET, read_topic
from tests.support.clients import wait_until

UNTOLD = -1
"""The offset of a record that is acknowledged without its place: of some retries librdkafka knows only that the record
was written. `Load.check` still finds it in its place by its value."""


@dataclass
class Load:
    """An idempotent producer that writes numbered records to every partition until it is stopped."""

    bootstrap: str
    topic: str
    partitions: int
    acked: dict[int, list[tuple[int, int, bytes]]] = field(default_factory=dict)
    """By partition: (offset, timestamp, value), in the order of acknowledgements; the offset is `UNTOLD` at times."""
    gaps_s: dict[int, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    sent: int = 0

    def __enter__(self) -> Load:
        self._last: dict[int, float] = {}
        self._stopping = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": True,
                "retry.backoff.ms": 10,
                "linger.ms": 5,
                **QUIET,
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(str(error))
            return
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None and value is not None
        now = time.monotonic()
        if partition in self._last:
            self.gaps_s[partition] = max(self.gaps_s.get(partition, 0.0), now - self._last[partition])
        self._last[partition] = now
        self.acked.setdefault(partition, []).append(
            (UNTOLD if offset is None else offset, message.timestamp()[1], value)
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            for partition in range(self.partitions):
                self._producer.produce(
                    self.topic, f"{partition}/{self.sent}".encode(), partition=partition, on_delivery=self._delivered
                )
            self.sent += 1
            self._producer.poll(0.002)

    def count(self) -> int:
        """Records acknowledged so far."""
        return sum(map(len, self.acked.values()))

    def more(self, records: int = 60) -> None:
        """Wait until so many more are acknowledged on every partition."""
        wanted = {each: len(self.acked.get(each, ())) + records for each in range(self.partitions)}
        wait_until(
            lambda: all(len(self.acked.get(each, ())) >= count for each, count in wanted.items()),
            f"{records} more records are acknowledged on every partition",
            30,
        )

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join(30)
        assert self._producer.flush(60) == 0, "not everything was acknowledged"

    def check(self, bootstrap: str) -> None:
        """What was acknowledged is there, once, in order, at its offset, with its timestamp; and nothing else."""
        assert not self.errors, self.errors[:5]
        found = read_topic(bootstrap, self.topic, self.partitions)
        for partition in range(self.partitions):
            stored = [(offset, stamp, value) for at, offset, stamp, _, value in found if at == partition]
            untold = {value for offset, _, value in self.acked[partition] if offset == UNTOLD}
            told = [row for row in self.acked[partition] if row[0] != UNTOLD]
            assert [row for row in stored if row[2] not in untold] == told
            assert [offset for offset, _, _ in stored] == list(range(self.sent))
            assert [value for _, _, value in stored] == [f"{partition}/{n}".encode() for n in range(self.sent)]
