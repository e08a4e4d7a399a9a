"""A consumer group with librdkafka's default settings, as an application has it: what it is told, and what it reads.

    with DefaultGroup(bootstrap, "orders", partitions) as group:
        ...
        group.wait_read(load.ends())
    assert group.problems == []

Offsets of a partition are to follow each other; after a rebalance some may come again, which is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, Message

from tests.support.partition_load import number_of

DEADLINE_S = 120.0


class DefaultGroup:
    """See the module. `wait_read` is for the thread that made it."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, members: int = 2) -> None:
        self.problems: list[str] = []
        self.again = 0
        """Records that were delivered again."""
        self._topic = topic
        self._due = [0] * partitions
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        settings = {"bootstrap.servers": bootstrap, "group.id": "readers", "auto.offset.reset": "earliest"}
        self._threads = [
            threading.Thread(target=self._run, args=({**settings, "log_level": 0},), daemon=True)
            for _ in range(members)
        ]

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for each in self._threads:
            each.join(DEADLINE_S)
        if kind is None:
            assert not any(each.is_alive() for each in self._threads), "a member of the group does not end"

    def _run(self, settings: dict[str, str | int]) -> None:
        consumer = Consumer(settings)
        consumer.subscribe([self._topic])
        while not self._stopping.is_set():
            message = consumer.poll(0.1)
            if message is not None:
                self._take(message)
        consumer.close()

    def _take(self, message: Message) -> None:
        error, partition, offset = message.error(), message.partition(), message.offset()
        with self._lock:
            if error is not None or partition is None or offset is None:
                self.problems.append(f"the application was told: {error}")
                return
            if number_of(message.value()) != offset:
                self.problems.append(f"partition {partition}: record {number_of(message.value())} at offset {offset}")
            if offset > self._due[partition]:
                self.problems.append(f"partition {partition}: offset {offset} where {self._due[partition]} was due")
            self.again += offset < self._due[partition]
            self._due[partition] = max(self._due[partition], offset + 1)

    def wait_read(self, ends: Mapping[int, int], timeout_s: float = DEADLINE_S) -> None:
        """Until the group has read up to these offsets. Raises `AssertionError`."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                missing = {at: self._due[at] for at, end in ends.items() if self._due[at] < end}
            if not missing:
                return
            assert time.monotonic() < deadline, f"read up to {missing} only; {self.problems[:5]}"
            time.sleep(0.05)
