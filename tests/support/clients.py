"""Real Kafka clients behind one small interface, so that one scenario runs over all of them.

Each kit creates a topic, produces records with a compression type and idempotence on, and consumes as a member of a
group until it has seen enough, committing what it saw.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Message, TopicPartition

from tests.support.kafka_python import ClosingSelector

Record = tuple[bytes | None, bytes]
DEADLINE_S = 120.0
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
FAST_GROUP = {"session_timeout_ms": 6_000, "heartbeat_interval_ms": 500}


@dataclass
class Member:
    """A consumer in a group, running in a thread of its own until told to stop."""

    records: list[Record] = field(default_factory=list)
    assigned: set[int] = field(default_factory=set)
    error: BaseException | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def stop(self) -> None:
        self.stopping.set()
        assert self.thread is not None
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "the consumer did not stop"
        if self.error is not None:
            raise self.error


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Poll `condition` until it holds; fail naming `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        threading.Event().wait(0.02)


def value_of(message: Message) -> bytes:
    """The value of a record that has one."""
    value = message.value()
    assert value is not None
    return value


def place_of(message: Message) -> tuple[str, int]:
    """Topic and partition of a record that was consumed or acknowledged."""
    topic, partition = message.topic(), message.partition()
    assert topic is not None and partition is not None
    return topic, partition


class Kit:
    """One client library."""

    name: str
    reports_assignment = True

    def create_topic(self, bootstrap: str, topic: str, partitions: int) -> None:
        raise NotImplementedError

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str) -> None:
        raise NotImplementedError

    def _consume(self, bootstrap: str, topic: str, group: str, member: Member) -> None:
        raise NotImplementedError

    def join(self, bootstrap: str, topic: str, group: str) -> Member:
        """Start a member; it consumes and commits until it is stopped, then leaves."""
        member = Member()

        def run() -> None:
            try:
                self._consume(bootstrap, topic, group, member)
            except BaseException as error:  # noqa: BLE001 - handed to the test by Member.stop
                member.error = error

        member.thread = threading.Thread(target=run, daemon=True)
        member.thread.start()
        return member


class Confluent(Kit):
    name = "confluent-kafka"

    def create_topic(self, bootstrap: str, topic: str, partitions: int) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(topic, num_partitions=partitions)])[topic].result(DEADLINE_S)

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str) -> None:
        from confluent_kafka import Producer

        failures: list[object] = []
        producer = Producer(
            {"bootstrap.servers": bootstrap, "compression.type": codec, "enable.idempotence": True, "linger.ms": 5}
        )
        for key, value in records:
            producer.produce(topic, value, key, on_delivery=lambda error, _: failures.append(error) if error else None)
        assert producer.flush(DEADLINE_S) == 0
        assert not failures, failures

    def _consume(self, bootstrap: str, topic: str, group: str, member: Member) -> None:
        from confluent_kafka import Consumer, KafkaException

        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": FAST_GROUP["session_timeout_ms"],
                "heartbeat.interval.ms": FAST_GROUP["heartbeat_interval_ms"],
            }
        )

        def assigned(_: object, partitions: list[TopicPartition]) -> None:
            member.assigned = {partition.partition for partition in partitions}

        consumer.subscribe([topic], on_assign=assigned)
        try:
            while not member.stopping.is_set():
                for message in consumer.consume(500, 0.2):
                    if message.error() is not None:
                        raise AssertionError(message.error())
                    member.records.append((message.key(), value_of(message)))
                if member.records:
                    try:
                        consumer.commit(asynchronous=False)
                    except KafkaException as error:
                        if error.args[0].name() not in ("_NO_OFFSET", "REBALANCE_IN_PROGRESS"):
                            raise
        finally:
            consumer.close()


class Aiokafka(Kit):
    name = "aiokafka"

    def create_topic(self, bootstrap: str, topic: str, partitions: int) -> None:
        async def run() -> None:
            from aiokafka.admin import AIOKafkaAdminClient, NewTopic

            admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
            await admin.start()
            try:
                await admin.create_topics([NewTopic(topic, partitions, 1)])
            finally:
                await admin.close()

        asyncio.run(run())

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str) -> None:
        async def run() -> None:
            from aiokafka import AIOKafkaProducer

            producer = AIOKafkaProducer(
                bootstrap_servers=bootstrap,
                enable_idempotence=True,
                compression_type=None if codec == "none" else codec,
                linger_ms=5,
            )
            await producer.start()
            try:
                waiting = [await producer.send(topic, value, key) for key, value in records]
                await asyncio.gather(*waiting)
            finally:
                await producer.stop()

        asyncio.run(run())

    def _consume(self, bootstrap: str, topic: str, group: str, member: Member) -> None:
        async def run() -> None:
            from aiokafka import AIOKafkaConsumer
            from aiokafka.errors import CommitFailedError, IllegalGenerationError, RebalanceInProgressError

            consumer = AIOKafkaConsumer(
                topic,
                bootstrap_servers=bootstrap,
                group_id=group,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                **FAST_GROUP,
            )
            await consumer.start()
            try:
                while not member.stopping.is_set():
                    member.assigned = {partition.partition for partition in consumer.assignment()}
                    batches = await consumer.getmany(timeout_ms=200)
                    for messages in batches.values():
                        member.records.extend((message.key, message.value) for message in messages)
                    if batches:
                        try:
                            await consumer.commit()
                        except (CommitFailedError, IllegalGenerationError, RebalanceInProgressError):
                            continue  # a rebalance came between; the next owner reads these records again
            finally:
                await consumer.stop()

        asyncio.run(run())


class KafkaPython(Kit):
    name = "kafka-python"

    def create_topic(self, bootstrap: str, topic: str, partitions: int) -> None:
        from kafka.admin import KafkaAdminClient, NewTopic

        admin = KafkaAdminClient(bootstrap_servers=bootstrap, selector=ClosingSelector)
        try:
            admin.create_topics([NewTopic(topic, partitions, 1)])
        finally:
            admin.close()

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str) -> None:
        from kafka import KafkaProducer

        producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            selector=ClosingSelector,
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            linger_ms=5,
        )
        try:
            waiting = [producer.send(topic, value, key) for key, value in records]
            for one in waiting:
                one.get(DEADLINE_S)
        finally:
            producer.close(DEADLINE_S)

    def _consume(self, bootstrap: str, topic: str, group: str, member: Member) -> None:
        from kafka import KafkaConsumer
        from kafka.errors import CommitFailedError

        consumer = KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            selector=ClosingSelector,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            **FAST_GROUP,
        )
        try:
            while not member.stopping.is_set():
                batches = consumer.poll(timeout_ms=200)
                member.assigned = {partition.partition for partition in consumer.assignment()}
                for messages in batches.values():
                    member.records.extend((message.key, message.value) for message in messages)
                if batches:
                    try:
                        consumer.commit()
                    except CommitFailedError:
                        continue  # a rebalance came between; the next owner reads these records again
        finally:
            consumer.close(autocommit=False)


class Kcat(Kit):
    name = "kcat"
    reports_assignment = False

    def __init__(self) -> None:
        self.binary = shutil.which("kcat") or self._installed()

    @staticmethod
    def _installed() -> str:
        installer = Path(__file__).parents[2] / "localstack" / "install.py"
        return subprocess.run(
            [sys.executable, str(installer), "kcat"], check=True, capture_output=True, text=True
        ).stdout.split()[-1]

    def create_topic(self, bootstrap: str, topic: str, partitions: int) -> None:
        """kcat cannot create topics but by asking for them: the broker creates with its default partitions."""
        subprocess.run(
            [self.binary, "-b", bootstrap, "-L", "-t", topic, "-X", "allow.auto.create.topics=true"],
            check=True,
            timeout=DEADLINE_S,
            capture_output=True,
        )

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str) -> None:
        lines = b"".join((key or b"") + b"\t" + value + b"\n" for key, value in records)
        command = [self.binary, "-b", bootstrap, "-P", "-t", topic, "-K", "\t", "-z", codec]
        command += ["-X", "enable.idempotence=true"]
        subprocess.run(command, input=lines, check=True, timeout=DEADLINE_S, capture_output=True)

    def _consume(self, bootstrap: str, topic: str, group: str, member: Member) -> None:
        command = [self.binary, "-b", bootstrap, "-G", group, "-K", "\t", "-u", "-q"]
        command += ["-X", "auto.offset.reset=earliest", "-X", "auto.commit.interval.ms=200"]
        command += ["-X", "session.timeout.ms=6000", "-X", "heartbeat.interval.ms=500", topic]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None

        def stop() -> None:
            member.stopping.wait()
            process.terminate()

        threading.Thread(target=stop, daemon=True).start()
        for line in _lines(process.stdout):
            key, _, value = line.partition(b"\t")
            member.records.append((key or None, value))
        error = process.stderr.read().decode(errors="replace")
        process.stderr.close()
        process.stdout.close()
        code = process.wait(DEADLINE_S)
        if not member.stopping.is_set():
            raise AssertionError(f"kcat ended by itself with {code}: {error}")


def _lines(stream: object) -> Iterator[bytes]:
    for line in stream:  # type: ignore[attr-defined]
        yield line.rstrip(b"\n")


KITS: dict[str, type[Kit]] = {kit.name: kit for kit in (Confluent, Aiokafka, KafkaPython, Kcat)}
