"""The clients of the chaos harness: confluent-kafka clients in threads, which record all operations in a history.

- `Writer`: a producer, idempotent or plain, that sends numbered records to every partition.
- `ClientReader`: a consumer of all partitions by assignment, or a member of a group that commits what it read.
- `Committer`: commits for a group without members, many times per second.
- `Asker`: reads watermarks and the groups' committed offsets.
- `RecordDeleter`: deletes the oldest records of some partitions.

A record's value is its number, padded. An error is `info`: librdkafka does not report whether a request was sent. Only
a refusal by the group coordinator is `fail`.

Entry: `Clients`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container
from types import TracebackType
from typing import Any, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tidelog.simulation.checkers.history import UNKNOWN, History, Op

TOPIC = "chaos"
GROUP = "chaos-group"
EMPTY_GROUP = "chaos-empty-group"
"""A group without members: its commits wait for no rebalance."""
FINAL_PROCESS = 1000
POLL_RECORDS = 1000
KEPT_RECORDS = 50
"""Number of records before the reader's position that are not deleted."""
REFUSED = frozenset((KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS))
"""Errors of a commit that certainly did not happen, if it was sent once."""
RETRY_BACKOFF_MS = 20
QUICK: dict[str, Any] = {
    "log_level": 0,  # librdkafka would report every refused connection
    "retry.backoff.ms": RETRY_BACKOFF_MS,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "socket.timeout.ms": 10_000,  # time-out of a request to a paused process
}


class ClientJournal:
    """A history, with the clock and the numbers of records and transactions shared by all clients."""

    def __init__(self, bootstrap: str, partitions: int, about: dict[str, Any]) -> None:
        self.bootstrap = bootstrap
        self.partitions = partitions
        self.history = History(about=about)
        self._start_ns = time.monotonic_ns()
        self.values = itertools.count()
        self.transactions = itertools.count(1)
        self.acknowledged_us = [-1] * partitions
        """Time of each partition's last acknowledgement."""

    def now_us(self) -> int:
        """Microseconds since the start."""
        return (time.monotonic_ns() - self._start_ns) // 1000

    def begin(self, kind: Any, process: int, **fields: Any) -> Op:
        """Record the start of an operation."""
        return self.history.begin(kind, process, self.now_us(), **fields)

    def end(self, op: Op, outcome: Any, **fields: Any) -> None:
        """Record the end of an operation."""
        self.history.end(op, outcome, self.now_us(), **fields)


class _Worker(threading.Thread):
    """A client that runs until it is stopped. Its exception is kept."""

    def __init__(self, journal: ClientJournal, process: int) -> None:
        super().__init__(daemon=True, name=f"chaos-{process}")
        self.journal = journal
        self.process = process
        self.stopping = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """The thread's main function."""
        try:
            self.work()
        except Exception as error:  # noqa: BLE001  # reported by the harness, which ends with it
            self.error = error

    def work(self) -> None:
        """Work until `stopping` is set."""
        raise NotImplementedError

    def commit(self, consumer: Consumer, group: str, partition: int, offset: int) -> bool:
        """Commit one offset; return whether that was acknowledged."""
        fields = {"topic": TOPIC, "partition": partition, "group": group, "offset": offset}
        op = self.journal.begin("commit", self.process, **fields)
        began_s = time.monotonic()
        try:
            (done,) = consumer.commit(offsets=[TopicPartition(TOPIC, partition, offset)], asynchronous=False)
        except KafkaException as raised:
            error = raised.args[0]
        else:
            error = done.error
        if error is None:
            self.journal.end(op, "ok")
        else:
            # librdkafka sends a commit again whose connection broke: the first one may have happened all the same.
            sent_once = time.monotonic() - began_s < RETRY_BACKOFF_MS / 2_000
            self.journal.end(op, "fail" if sent_once and error.code() in REFUSED else "info", error=str(error))
        return error is None


class Writer(_Worker):
    """A producer. `rate` is in records per second, over all partitions."""

    def __init__(
        self, journal: ClientJournal, process: int, *, idempotent: bool, rate: float, value_bytes: int
    ) -> None:
        super().__init__(journal, process)
        self._idempotent = idempotent
        self._pause_s = journal.partitions / rate
        self._value_bytes = value_bytes
        settings: dict[str, Any] = {"acks": "all", "linger.ms": 2, "enable.idempotence": idempotent}
        settings |= {"message.timeout.ms": 300_000} if idempotent else {"message.timeout.ms": 15_000, "retries": 0}
        self._producer = Producer({"bootstrap.servers": journal.bootstrap, **QUICK, **settings})
        self.left = 0

    def work(self) -> None:
        """Send until stopped, then wait for the records in flight."""
        due = time.monotonic()
        while not self.stopping.is_set():
            due = max(due + self._pause_s, time.monotonic() - 1.0)  # records delayed by a stall are not sent later
            for partition in range(self.journal.partitions):
                self._send(partition)
            while (left_s := due - time.monotonic()) > 0:
                self._producer.poll(left_s)
            self._producer.poll(0)
        self.left = self._producer.flush(60.0)

    def _send(self, partition: int) -> None:
        value = next(self.journal.values)
        op = self.journal.begin(
            "send", self.process, topic=TOPIC, partition=partition, values=[value], idempotent=self._idempotent
        )
        while True:
            try:
                self._producer.produce(
                    TOPIC,
                    (b"%d" % value).ljust(self._value_bytes),
                    partition=partition,
                    on_delivery=self._delivered(op),
                )
                return
            except BufferError:
                self._producer.poll(0.05)

    def _delivered(self, op: Op) -> Callable[[KafkaError | None, Message], None]:
        def done(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self.journal.end(op, "info", error=str(error))
                return
            offset = message.offset()
            known = offset is not None and offset >= 0
            self.journal.end(op, "ok", offsets=[offset] if known else [])
            self.journal.acknowledged_us[op.partition] = op.ended_us

        return done


class ClientReader(_Worker):
    """A consumer: a member of the group, or without a group a reader of all partitions from the beginning."""

    def __init__(
        self,
        journal: ClientJournal,
        process: int,
        *,
        group: str = "",
        make_consumer: Callable[[dict[str, Any]], Consumer] = Consumer,
    ) -> None:
        """`make_consumer` gets the configuration of the consumer."""
        super().__init__(journal, process)
        self._group = group
        self._consumer = make_consumer(
            {
                "bootstrap.servers": journal.bootstrap,
                **QUICK,
                "group.id": group or f"chaos-{process}",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "check.crcs": True,
                "session.timeout.ms": 10_000,
                "fetch.wait.max.ms": 100,
            }
        )
        self._ends: dict[int, int] = {}
        """Position in each assigned partition."""
        self._mine: set[int] = set()

    def work(self) -> None:
        """Read, and commit in a group, until stopped."""
        try:
            self.begin()
            committed_s = time.monotonic()
            while not self.stopping.is_set():
                self.poll(0.3)
                if self._group and time.monotonic() - committed_s > 0.3:
                    committed_s = time.monotonic()
                    self.commit_all()
        finally:
            self._consumer.close()

    def begin(self) -> None:
        """Join the group, or read every partition from its beginning."""
        if self._group:
            self._consumer.subscribe([TOPIC], on_assign=self._assigned, on_revoke=self._revoked)
        else:
            self.assign_all()

    def position(self, partition: int) -> int:
        """Return the position in a partition. Thread-safe."""
        return self._ends.get(partition, 0)

    def assign_all(self) -> None:
        """Read every partition from its beginning."""
        everywhere = range(self.journal.partitions)
        for partition in everywhere:
            self._note("assign", partition, offset=0)
            self._ends[partition] = 0
        self._consumer.assign([TopicPartition(TOPIC, at, OFFSET_BEGINNING) for at in everywhere])

    def _assigned(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._ends.clear()
        self._mine = {each.partition for each in partitions}
        for partition in sorted(self._mine):
            self._note("assign", partition)

    def _revoked(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        """Drop revoked partitions: a commit for them would cost the client its new membership.

        librdkafka sends such a commit behind the JoinGroup that it waits for, and joins again when it is refused.
        """
        if not self.stopping.is_set():
            for partition in sorted(self._mine):
                self._note("revoke", partition, offset=self._ends.get(partition, UNKNOWN))
        self._ends.clear()
        self._mine.clear()

    def _note(self, kind: Any, partition: int, offset: int = UNKNOWN) -> None:
        fields = {"topic": TOPIC, "partition": partition, "offset": offset, "group": self._group}
        self.journal.history.note(kind, self.process, self.journal.now_us(), **fields)

    def poll(self, timeout_s: float) -> int:
        """Read available records; return their number."""
        began_us = self.journal.now_us()
        found: dict[int, list[Message]] = defaultdict(list)
        messages = self._consumer.consume(POLL_RECORDS, timeout_s)
        for message in messages:
            partition = message.partition()
            if message.error() is None and partition is not None:
                found[partition].append(message)
        if len(messages) < POLL_RECORDS:  # there was time to receive from all of them
            self._note_empty(began_us, found.keys())
        for partition, messages in found.items():
            offsets = [message.offset() or 0 for message in messages]
            epochs = [message.leader_epoch() for message in messages]
            op = self.journal.history.begin("poll", self.process, began_us, topic=TOPIC, partition=partition)
            self.journal.end(
                op,
                "ok",
                offsets=offsets,
                values=[int(message.value() or b"-1") for message in messages],
                epochs=[each for each in epochs if each is not None] if None not in epochs else [],
            )
            if partition in self._mine or not self._group:
                self._ends[partition] = offsets[-1] + 1
        return sum(map(len, found.values()))

    def _note_empty(self, began_us: int, found: Container[int]) -> None:
        """Record the partitions without records whose position is known."""
        for partition, offset in self._ends.items():
            if partition not in found:
                fields = {"topic": TOPIC, "partition": partition, "offset": offset}
                self.journal.end(self.journal.history.begin("poll", self.process, began_us, **fields), "ok")

    def commit_all(self) -> None:
        """Commit the position in each partition that was read."""
        for partition, offset in list(self._ends.items()):
            if not self.commit(self._consumer, self._group, partition, offset):
                return

    def read_to(self, ends: dict[int, int], timeout_s: float) -> dict[int, int]:
        """Read everything up to these offsets, in the caller's thread; return what could not be read in time."""
        deadline = time.monotonic() + timeout_s
        try:
            self.assign_all()
            while True:
                left = {at: end for at, end in ends.items() if self._ends.get(at, 0) < end}
                if not left or time.monotonic() > deadline:
                    return left
                self.poll(0.5)
        finally:
            self._consumer.close()


class Committer(_Worker):
    """Commits a reader's position for `EMPTY_GROUP`."""

    def __init__(self, journal: ClientJournal, process: int, reader: ClientReader) -> None:
        super().__init__(journal, process)
        self._consumer = Consumer({"bootstrap.servers": journal.bootstrap, **QUICK, "group.id": EMPTY_GROUP})
        self._reader = reader

    def work(self) -> None:
        """Commit until stopped."""
        try:
            for partition in itertools.cycle(range(self.journal.partitions)):
                if self.stopping.wait(0.02):
                    return
                self.commit(self._consumer, EMPTY_GROUP, partition, self._reader.position(partition))
        finally:
            self._consumer.close()


class Asker(_Worker):
    """Reads every partition's watermarks and the groups' committed offsets, in turn."""

    def __init__(self, journal: ClientJournal, process: int) -> None:
        super().__init__(journal, process)
        self._consumers = {
            group: Consumer({"bootstrap.servers": journal.bootstrap, **QUICK, "group.id": group})
            for group in (GROUP, EMPTY_GROUP)
        }

    def work(self) -> None:
        """Read until stopped."""
        try:
            for partition in itertools.cycle(range(self.journal.partitions)):
                if self.stopping.wait(0.05):
                    return
                self.watermarks(partition, 5.0)
                self.committed(partition, 5.0)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections."""
        for consumer in self._consumers.values():
            consumer.close()

    def watermarks(self, partition: int, timeout_s: float) -> tuple[int, int] | None:
        """Return log start offset and high watermark, if received in time."""
        op = self.journal.begin("list_offsets", self.process, topic=TOPIC, partition=partition)
        try:
            low, high = self._consumers[GROUP].get_watermark_offsets(
                TopicPartition(TOPIC, partition), timeout=timeout_s
            )
        except KafkaException as raised:
            self.journal.end(op, "fail", error=str(raised.args[0]))
            return None
        self.journal.end(op, "ok", log_start=low, high_watermark=high)
        return low, high

    def committed(self, partition: int, timeout_s: float) -> None:
        """Read the groups' committed offsets."""
        for group, consumer in self._consumers.items():
            self._committed(group, consumer, partition, timeout_s)

    def _committed(self, group: str, consumer: Consumer, partition: int, timeout_s: float) -> None:
        op = self.journal.begin("committed", self.process, topic=TOPIC, partition=partition, group=group)
        try:
            (found,) = consumer.committed([TopicPartition(TOPIC, partition)], timeout=timeout_s)
            error = found.error
        except KafkaException as raised:
            error = raised.args[0]
        if error is not None:
            self.journal.end(op, "fail", error=str(error))
            return
        self.journal.end(op, "ok", offset=found.offset if found.offset >= 0 else UNKNOWN)


class RecordDeleter(_Worker):
    """Deletes records of every fourth partition, up to a random offset before a reader's position."""

    def __init__(self, journal: ClientJournal, process: int, reader: ClientReader) -> None:
        super().__init__(journal, process)
        self._admin = AdminClient({"bootstrap.servers": journal.bootstrap, **QUICK})
        self._reader = reader

    def work(self) -> None:
        """Delete until stopped."""
        for partition in itertools.cycle(range(0, self.journal.partitions, 4)):
            if self.stopping.wait(1.0):
                return
            before = self._reader.position(partition) - KEPT_RECORDS
            if before > 0:
                self.delete(partition, before)

    def delete(self, partition: int, before: int) -> None:
        """Request a deletion; it may have been applied despite an error."""
        op = self.journal.begin("delete_records", self.process, topic=TOPIC, partition=partition, offset=before)
        where = TopicPartition(TOPIC, partition, before)
        try:
            (asked,) = self._admin.delete_records([where], request_timeout=10.0, operation_timeout=5.0).values()
            done = asked.result(15.0)
        except (KafkaException, TimeoutError) as error:
            self.journal.end(op, "info", error=str(error))
        else:
            self.journal.end(op, "ok", log_start=done.low_watermark)


class Clients:
    """All clients; a context manager that stops them in any case."""

    def __init__(self, journal: ClientJournal, *, rate: float = 800.0, value_bytes: int = 300) -> None:
        self.journal = journal
        self.writers = [
            Writer(journal, number, idempotent=number != 2, rate=rate / 2, value_bytes=value_bytes) for number in (1, 2)
        ]
        self.readers = [
            ClientReader(journal, 11),
            ClientReader(journal, 12, group=GROUP),
            ClientReader(journal, 13, group=GROUP),
        ]
        self._workers: list[_Worker] = [
            *self.writers,
            *self.readers,
            Committer(journal, 14, self.readers[0]),
            Asker(journal, 21),
            RecordDeleter(journal, 31, self.readers[0]),
        ]

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(self._workers, 5.0)

    @staticmethod
    def _stop(workers: list[_Worker], timeout_s: float) -> list[str]:
        """Return those that do not end in time."""
        for worker in workers:
            worker.stopping.set()
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            if worker.is_alive():
                worker.join(max(0.1, deadline - time.monotonic()))
        return [f"client {each.process} does not end" for each in workers if each.is_alive()]

    def problems(self) -> list[str]:
        """Clients that failed."""
        return [f"client {each.process}: {each.error!r}" for each in self._workers if each.error is not None]

    def finish(self, timeout_s: float = 90.0) -> list[str]:
        """Stop writing, read everything, and read all marks; return the problems."""
        problems = self._stop(list(self.writers), timeout_s)
        problems += [
            f"producer {each.process}: {each.left} records without an outcome" for each in self.writers if each.left
        ]
        asker, ends = Asker(self.journal, FINAL_PROCESS + 1), dict[int, int]()
        for partition in range(self.journal.partitions):
            deadline = time.monotonic() + 30.0
            while (marks := asker.watermarks(partition, 30.0)) is None and time.monotonic() < deadline:
                time.sleep(0.1)  # the last move may have just ended: a client refreshes its metadata and retries
            if marks is None:
                problems.append(f"{TOPIC}-{partition} does not tell its watermarks")
            else:
                ends[partition] = marks[1]
            asker.committed(partition, 30.0)
        left = ClientReader(self.journal, FINAL_PROCESS).read_to(ends, timeout_s)
        problems += [f"{TOPIC}-{partition} cannot be read up to {end}" for partition, end in left.items()]
        problems += self._stop([each for each in self._workers if each not in self.writers], timeout_s)
        with contextlib.suppress(KafkaException):
            asker.close()
        return problems + self.problems()
