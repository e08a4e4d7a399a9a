"""A consumer group that reads what `PartitionLoad` writes, and knows what it was promised.

    with GroupLoad(bootstrap, "orders", 24, members=2) as group:
        group.begin_round()
        ...
        group.wait_read({0: 812, 1: 812})
    problems = group.verify(bootstrap)

What must hold, and is looked at in every record, at every assignment and by an observer four times a second:

- the number in a record is its offset: the group sees the log as it was written;
- within an assignment offsets follow each other; a new one begins nowhere behind what the group has seen (nothing is
  missed) and nowhere before what was committed (the group's offsets never go back). Between the two a record may come
  again: that is at-least-once;
- a committed offset that anybody was told is never followed by a smaller one.

Members commit synchronously after each batch, so that a commit that is answered is a promise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from tests.support.gaps import Gaps
from tests.support.partition_load import number_of

DEADLINE_S = 120.0
LOOK_S = 0.25
MAX_PROBLEMS = 20


class GroupFacts:
    """What is known of the group's offsets, from all sides, and what was wrong. May be used by several threads."""

    def __init__(self, partitions: int) -> None:
        self._lock = threading.Lock()
        self._seen = [0] * partitions  # everything before it has been delivered
        self._committed = [0] * partitions  # the largest that anybody was told
        self.problems: list[str] = []
        self.records = self.repeated = self.commits = self.looks = 0

    def delivered(self, partition: int, offset: int, number: int, expected: int | None) -> None:
        """A member got a record. `expected`: the offset after its last one; None: its first since the assignment."""
        with self._lock:
            seen, committed = self._seen[partition], self._committed[partition]
            if number != offset:
                self._problem(f"partition {partition}: record {number} at offset {offset}")
            if expected is None:
                if offset > seen:
                    self._problem(f"partition {partition}: goes on at {offset}, and {seen} was never delivered")
                if offset < committed:
                    self._problem(f"partition {partition}: goes on at {offset}, and {committed} was committed")
            elif offset != expected:
                self._problem(f"partition {partition}: offset {offset} follows {expected - 1}")
            self.records += 1
            self.repeated += offset < seen
            self._seen[partition] = max(seen, offset + 1)

    def committed(self) -> list[int]:
        """The largest committed offset that anybody was told, by partition."""
        with self._lock:
            return list(self._committed)

    def seen(self) -> list[int]:
        """By partition: everything before it has been delivered."""
        with self._lock:
            return list(self._seen)

    def commit_answered(self, offsets: Sequence[tuple[int, int]]) -> None:
        """A member's commit of (partition, offset) was confirmed."""
        with self._lock:
            self.commits += 1
            for partition, offset in offsets:
                self._committed[partition] = max(self._committed[partition], offset)

    def looked(self, offsets: Sequence[tuple[int, int]], before: Sequence[int]) -> None:
        """The observer was told (partition, offset); `before`: what `committed` was when it asked."""
        with self._lock:
            self.looks += 1
            for partition, offset in offsets:
                if offset < before[partition]:
                    self._problem(f"partition {partition}: offset {offset} is committed, it was {before[partition]}")
                self._committed[partition] = max(self._committed[partition], offset)

    def _problem(self, text: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"group: {text}")


class _Member:
    """One consumer in a thread."""

    def __init__(self, config: dict[str, Any], topic: str, facts: GroupFacts, gaps: Gaps) -> None:
        self._consumer = Consumer(config)
        self._topic = topic
        self._facts = facts
        self._gaps = gaps
        self._expected: dict[int, int] = {}
        self._owes_commit = False
        self.assigned: frozenset[int] = frozenset()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _given(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._expected.clear()
        self.assigned = frozenset(each.partition for each in partitions)

    def _taken(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        self._expected.clear()
        self.assigned = frozenset()

    def _run(self) -> None:
        self._consumer.subscribe([self._topic], on_assign=self._given, on_revoke=self._taken, on_lost=self._taken)
        while not self.stopping.is_set():
            messages = self._consumer.consume(2_000, 0.02)
            for message in messages:
                self._take(message)
            if messages or self._owes_commit:
                self._commit()
        self._consumer.close()

    def _take(self, message: Message) -> None:
        partition, offset = message.partition(), message.offset()
        if message.error() is not None or partition is None or offset is None:
            return  # librdkafka goes on by itself; what it skipped would be seen by the next offset
        self._facts.delivered(partition, offset, number_of(message.value()), self._expected.get(partition))
        self._expected[partition] = offset + 1
        self._gaps.note(partition)

    def _commit(self) -> None:
        positions = [TopicPartition(self._topic, at, offset) for at, offset in self._expected.items()]
        self._owes_commit = bool(positions)
        if not positions:
            return
        try:
            done = self._consumer.commit(offsets=positions, asynchronous=False) or []
        except KafkaException:
            return  # not promised: the coordinator moves, or the members are sorted out. It is tried again
        self._owes_commit = any(one.error is not None for one in done)
        self._facts.commit_answered([(one.partition, one.offset) for one in done if one.error is None])


class GroupLoad:
    """See the module. Methods are for the thread that made it."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, members: int = 2, group: str = "readers") -> None:
        self.facts = GroupFacts(partitions)
        self._topic = topic
        self._partitions = partitions
        self._gaps = Gaps(partitions)
        self._config = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "log_level": 0,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 10_000,
            "retry.backoff.ms": 10,
            "fetch.error.backoff.ms": 10,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 100,
        }
        self._members = [_Member(self._config, topic, self.facts, self._gaps) for _ in range(members)]
        self._stopping = threading.Event()
        self._observer = threading.Thread(target=self._observe, daemon=True)

    def __enter__(self) -> Self:
        for member in self._members:
            member.thread.start()
        self._observer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        threads = [member.thread for member in self._members] + [self._observer]
        for member in self._members:
            member.stopping.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        if kind is None:
            assert not any(thread.is_alive() for thread in threads), "a member of the group does not end"

    def _observe(self) -> None:
        consumer = Consumer(self._config)  # it joins nothing
        asked = [TopicPartition(self._topic, each) for each in range(self._partitions)]
        while not self._stopping.wait(LOOK_S):
            before = self.facts.committed()
            try:
                found = consumer.committed(asked, timeout=5)
            except KafkaException:
                continue  # no answer is no promise
            offsets = [(each.partition, max(0, each.offset)) for each in found if each.error is None]
            self.facts.looked(offsets, before)
        consumer.close()

    def begin_round(self) -> None:
        """Measure gaps from now on."""
        self._gaps.begin_round()

    def gaps_s(self) -> dict[int, float]:
        """The longest time between two records of each partition since the round began, until now."""
        return self._gaps.longest_s()

    def wait_assigned(self) -> None:
        """Until each partition has one member. Raises `AssertionError`."""

        def shared() -> bool:
            held = sorted(partition for member in self._members for partition in member.assigned)
            return held == list(range(self._partitions))

        self._wait(shared, "the members have shared the partitions")

    def wait_read(self, ends: dict[int, int]) -> None:
        """Until the group has seen and committed everything before these offsets. Raises `AssertionError`."""
        self._wait(
            lambda: all(self.facts.seen()[at] >= end for at, end in ends.items()), "the group has read to the end"
        )
        self._wait(lambda: all(self.facts.committed()[at] >= end for at, end in ends.items()), "and committed it")

    def _wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, (
                f"not within {DEADLINE_S:g} s: {what} (seen {self.facts.seen()}, committed {self.facts.committed()})"
            )
            time.sleep(0.02)
