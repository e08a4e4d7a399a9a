"""Older Python clients: kafka-python 2.0, aiokafka 0.10, and confluent-kafka 2.0 (librdkafka 2.0).

    python older_clients.py BOOTSTRAP TOPIC

A line for each step; it ends with 1 if one has failed (tests/e2e/test_other_clients.py). It runs in an environment with
these clients and nothing else.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as Place
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin import NewTopic as Topic
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, NewPartitions, NewTopic
from kafka.structs import OffsetAndMetadata

AT_A_TIME = 20
DEADLINE_S = 30.0
CODECS = (None, "gzip", "snappy", "lz4", "zstd")


def equal(found: object, wanted: object) -> None:
    if found != wanted:
        raise ValueError(f"{found!r}, and not {wanted!r}")


class Walk:
    """The steps of all three."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._written = 0
        self.failed = 0

    def step(self, name: str, run: Callable[[], Any]) -> None:
        try:
            print(f"ok {name}: {run()}", flush=True)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told
            self.failed += 1
            print(f"failed {name}: {error!r}", flush=True)

    def kafka_python(self) -> None:
        admin = KafkaAdminClient(bootstrap_servers=self._bootstrap)
        topic = self._topic
        self.step("kafka-python: create topic", lambda: admin.create_topics([NewTopic(topic, 3, 1)]))
        self.step("kafka-python: create partitions", lambda: admin.create_partitions({topic: NewPartitions(4)}))
        for codec in CODECS:
            for acks in ("all", 1, 0):
                self.step(f"kafka-python: send {codec}, acks {acks}", partial(self._send, codec, acks))
        self.step("kafka-python: read as a group", lambda: self._read(f"{topic}-group"))
        self.step("kafka-python: offsets", self._offsets)
        self.step("kafka-python: members come and go", lambda: self._members_come_and_go(admin))
        self.step("kafka-python: groups", lambda: self._groups(admin))
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {"retention.ms": "1234567"})
        self.step("kafka-python: alter configs", lambda: admin.alter_configs([resource]))
        self.step("kafka-python: describe configs", lambda: len(admin.describe_configs([resource])[0].resources[0][4]))
        self.step("kafka-python: describe cluster", lambda: len(admin.describe_cluster()["brokers"]))
        self.step("kafka-python: delete topic", lambda: admin.delete_topics([topic]))

    def _send(self, codec: str | None, acks: str | int) -> int:
        producer = KafkaProducer(bootstrap_servers=self._bootstrap, compression_type=codec, acks=acks)
        values = [b"%d" % each for each in range(AT_A_TIME)]
        sent = [producer.send(self._topic, value, key=value, headers=[("h", b"v")]) for value in values]
        for each in sent:
            each.get(DEADLINE_S)
        producer.close()
        self._written += AT_A_TIME
        return AT_A_TIME

    def _consumer(self, group: str, topic: str, **more: object) -> KafkaConsumer:
        options = {"auto_offset_reset": "earliest", "heartbeat_interval_ms": 300, **more}
        return KafkaConsumer(topic, bootstrap_servers=self._bootstrap, group_id=group, **options)

    def _read(self, group: str) -> int:
        consumer = self._consumer(group, self._topic)
        found, end = 0, time.monotonic() + DEADLINE_S
        while found < self._written and time.monotonic() < end:
            found += sum(map(len, consumer.poll(200).values()))
        consumer.commit()
        consumer.close()
        equal(found, self._written)
        return found

    def _offsets(self) -> object:
        consumer = KafkaConsumer(bootstrap_servers=self._bootstrap, group_id=f"{self._topic}-offsets")
        first = TopicPartition(self._topic, 0)
        consumer.assign([first])
        equal(consumer.beginning_offsets([first]), {first: 0})
        equal(consumer.offsets_for_times({first: 1})[first].offset, 0)
        consumer.commit({first: OffsetAndMetadata(3, "meta")})
        equal(consumer.committed(first, metadata=True), OffsetAndMetadata(3, "meta"))
        consumer.seek_to_end()
        equal({first: consumer.position(first)}, consumer.end_offsets([first]))
        consumer.close()
        return "as written"

    def _members_come_and_go(self, admin: KafkaAdminClient) -> int:
        """Three members come, one after the other; then the first one leaves."""
        shared = f"{self._topic}-shared"
        admin.create_topics([NewTopic(shared, 6, 1)])
        stops = [threading.Event() for _ in range(3)]
        found: set[bytes] = set()

        def read(stop: threading.Event) -> None:
            consumer = self._consumer(f"{shared}-group", shared, session_timeout_ms=10_000)
            while not stop.is_set():
                for messages in consumer.poll(100).values():
                    found.update(each.value for each in messages)
            consumer.close()

        members = [threading.Thread(target=read, args=(stop,)) for stop in stops]
        producer = KafkaProducer(bootstrap_servers=self._bootstrap)
        for number in range(4):
            if number < 3:
                members[number].start()
            else:
                stops[0].set()
                members[0].join()
            for each in range(60):
                producer.send(shared, b"%d-%d" % (number, each))
            producer.flush()
            end = time.monotonic() + DEADLINE_S
            while len(found) < 60 * (number + 1) and time.monotonic() < end:
                time.sleep(0.01)
        for stop, member in zip(stops[1:], members[1:], strict=True):
            stop.set()
            member.join()
        producer.close()
        admin.delete_topics([shared])
        equal(len(found), 240)
        return len(found)

    def _groups(self, admin: KafkaAdminClient) -> object:
        group = f"{self._topic}-group"
        equal((group, "consumer") in admin.list_consumer_groups(), True)
        equal(admin.describe_consumer_groups([group])[0].state, "Empty")
        offsets = admin.list_consumer_group_offsets(group)
        equal(sum(each.offset for each in offsets.values()), self._written)
        return admin.delete_consumer_groups([group])

    async def aiokafka(self) -> int:
        """All codecs by idempotent producers, and a transaction of each kind; read committed."""
        topic, servers = f"{self._topic}-aiokafka", self._bootstrap
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([Topic(topic, 2, 1)])[topic].result(DEADLINE_S)
        for codec in CODECS:
            async with AIOKafkaProducer(
                bootstrap_servers=servers, compression_type=codec, enable_idempotence=True
            ) as producer:
                for each in range(AT_A_TIME):
                    await producer.send_and_wait(topic, b"%d" % each)
        async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=topic) as producer:
            async with producer.transaction():
                await producer.send_and_wait(topic, b"committed")
                await producer.send_offsets_to_transaction({Place(topic, 0): 1}, f"{topic}-with-transactions")
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"aborted")
            await producer.abort_transaction()
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=servers,
            group_id=f"{topic}-group",
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        found: list[bytes] = []
        async with consumer:
            while len(found) < len(CODECS) * AT_A_TIME + 1:
                found.append((await asyncio.wait_for(consumer.getone(), DEADLINE_S)).value)
            await consumer.commit()
        equal(b"aborted" in found, False)
        return len(found)

    def confluent(self) -> object:
        """Transactions, and two members of a group with the cooperative protocol."""
        topic, servers = f"{self._topic}-confluent", self._bootstrap
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([Topic(topic, 3, 1)])[topic].result(DEADLINE_S)
        producer = Producer({"bootstrap.servers": servers, "transactional.id": topic})
        producer.init_transactions(DEADLINE_S)
        for each in range(6):
            producer.begin_transaction()
            producer.produce(topic, b"%d" % each)
            producer.flush()
            end = producer.abort_transaction if each % 3 == 2 else producer.commit_transaction
            end(DEADLINE_S)
        options = {"auto.offset.reset": "earliest", "partition.assignment.strategy": "cooperative-sticky"}
        members = [Consumer({"bootstrap.servers": servers, "group.id": topic, **options}) for _ in range(2)]
        for member in members:
            member.subscribe([topic])
        found: set[bytes] = set()
        until = time.monotonic() + DEADLINE_S
        while len(found) < 4 and time.monotonic() < until:
            for member in members:
                message = member.poll(0.05)
                if message is not None and not message.error():
                    found.add(message.value() or b"")
        for member in members:
            member.close()
        equal(found, {b"0", b"1", b"3", b"4"})
        return len(found)


def main(bootstrap: str, topic: str) -> int:
    walk = Walk(bootstrap, topic)
    walk.kafka_python()
    walk.step("aiokafka", lambda: asyncio.run(walk.aiokafka()))
    walk.step("confluent-kafka", walk.confluent)
    return 1 if walk.failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
