"""The three Python clients against the data path, without groups: they negotiate, produce and consume everything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import kafka
import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioTopicPartition
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaTCPTransport

from tests.support.clients import place_of, value_of
from tests.support.kafka_python import ClosingSelector
from tests.support.kafka_world import KafkaWorld
from tidelog.broker.replication.inputs import NotEnoughReplicas
from tidelog.stream.partition_log import PartitionLog

COUNT = 300
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


def expected() -> list[tuple[int, bytes]]:
    return sorted((n % 2, b"value-%d" % n * 5) for n in range(COUNT))


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """The address of a broker that serves the topic `t`."""
    async with KafkaWorld() as world:
        host, port = world.server.address
        brokers = world.controller.image.brokers
        brokers[1] = msgspec.structs.replace(brokers[1], host=host, port=port)  # the port that the system chose
        await world.topic("t", 2)
        yield f"{host}:{port}"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("idempotent", [False, True])
async def test_confluent_kafka(codec: str, idempotent: bool) -> None:
    def work(bootstrap: str) -> None:
        failures: list[Any] = []
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "compression.type": codec,
                "enable.idempotence": idempotent,
                "linger.ms": 5,
            }
        )
        for partition, value in expected():
            producer.produce("t", value=value, partition=partition, on_delivery=lambda e, _: failures.append(e))
        assert producer.flush(20) == 0 and not any(failures)
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": False})
        consumer.assign([TopicPartition("t", index, 0) for index in range(2)])
        got: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + 20
        while len(got) < COUNT and time.monotonic() < deadline:
            for message in consumer.consume(COUNT, 0.5):
                assert message.error() is None
                got.append((place_of(message)[1], value_of(message)))
        assert consumer.get_watermark_offsets(TopicPartition("t", 0)) == (0, COUNT // 2)
        consumer.close()
        assert sorted(got) == expected()

    async with serving() as bootstrap:
        await asyncio.to_thread(work, bootstrap)


async def test_confluent_kafka_hears_of_no_success_of_a_first_batch_that_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes a batch for written when one that it has sent behind it is: so that one is not taken first."""
    asked = 0

    def too_few_once(log: PartitionLog) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise NotEnoughReplicas("1 replica is in sync")

    def work(bootstrap: str) -> None:
        told: dict[Any, Any] = {}
        one_each = {"linger.ms": 0, "batch.num.messages": 1, "enable.idempotence": True}
        producer = Producer({"bootstrap.servers": bootstrap, **one_each})
        values = [b"%d" % number for number in range(8)]
        for value in values:
            producer.produce("t", value, partition=0, on_delivery=lambda e, message: told.update({message.value(): e}))
        assert producer.flush(20) == 0 and told == dict.fromkeys(values)
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": False})
        consumer.assign([TopicPartition("t", 0, 0)])
        got = [value_of(message) for message in consumer.consume(len(values), 10)]
        consumer.close()
        assert got == values

    monkeypatch.setattr(PartitionLog, "check_writable", too_few_once)
    async with serving() as bootstrap:
        await asyncio.to_thread(work, bootstrap)


@pytest.mark.parametrize("codec", [None, *CODECS[1:]])
async def test_kafka_python(codec: str | None) -> None:
    def work(bootstrap: str) -> None:
        producer = kafka.KafkaProducer(bootstrap_servers=bootstrap, selector=ClosingSelector, compression_type=codec)
        for partition, value in expected():
            producer.send("t", value, partition=partition)
        producer.flush(20)
        producer.close()
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=bootstrap,
            selector=ClosingSelector,
            auto_offset_reset="earliest",
            consumer_timeout_ms=20_000,
            enable_auto_commit=False,
        )
        consumer.assign([kafka.TopicPartition("t", index) for index in range(2)])
        got = [(record.partition, record.value) for _, record in zip(range(COUNT), consumer, strict=False)]
        assert consumer.end_offsets([kafka.TopicPartition("t", 1)]) == {kafka.TopicPartition("t", 1): COUNT // 2}
        consumer.close()
        assert sorted(got) == expected()

    async with serving() as bootstrap:
        await asyncio.to_thread(work, bootstrap)


def test_kafka_python_leaves_no_connection_open_that_it_has_not_written_to_when_it_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        net = NetworkSelector(selector=ClosingSelector)
        transport = KafkaTCPTransport(net, ours)
        transport.write(b"a request")
        transport.close()  # once that is written
        net.close()
        assert ours.fileno() == -1


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("codec", [None, *CODECS[1:]])
async def test_aiokafka(codec: str | None, idempotent: bool) -> None:
    async with serving() as bootstrap:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap, compression_type=codec, enable_idempotence=idempotent, linger_ms=5
        )
        async with producer:
            sent = [await producer.send("t", value, partition=partition) for partition, value in expected()]
            await asyncio.gather(*sent)
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
        consumer.assign([AioTopicPartition("t", index) for index in range(2)])
        got: list[tuple[int, bytes]] = []
        async with consumer, asyncio.timeout(60):
            while len(got) < COUNT:
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    got += [(record.partition, record.value) for record in records]
        assert sorted(got) == expected()
