"""Transactions with real clients on three brokers: atomic, fenced, with offsets, through moves, ended by time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import DEADLINE_S, place_of, value_of, wait_until
from tests.support.cluster import Cluster
from tests.support.kafka_python import ClosingSelector
from tidelog.broker.coordinators.topic import OFFSETS_TOPIC, TRANSACTION_TOPIC

PARTITIONS = 3
TOPIC = "accounts"
SOURCE = "orders"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        yield cluster


def transactional(cluster: Cluster, name: str, **extra: Any) -> Producer:
    """A transactional producer that has its producer id."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": name, **QUIET, **extra})
    producer.init_transactions(DEADLINE_S)
    return producer


def write(producer: Producer, number: int) -> None:
    """One record to each partition, all with the same value."""
    for partition in range(PARTITIONS):
        producer.produce(TOPIC, b"%d" % number, partition=partition)


def read(cluster: Cluster, topic: str, *, isolation: str = "read_committed", partitions: int = PARTITIONS) -> list[Any]:
    """The values of each partition up to its end as this isolation level sees it."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            **QUIET,
        }
    )
    try:
        found = []
        for partition in range(partitions):
            consumer.assign([TopicPartition(topic, partition, 0)])
            values: list[bytes] = []
            while True:
                message = consumer.poll(DEADLINE_S)
                assert message is not None, f"partition {partition} does not come to an end: {values}"
                error = message.error()
                if error is not None:
                    assert error.name() == "_PARTITION_EOF", error
                    break
                values.append(value_of(message))
            found.append(values)
        return found
    finally:
        consumer.close()


def committed(*numbers: int) -> list[Any]:
    """What each partition holds after these transactions."""
    return [[b"%d" % number for number in numbers]] * PARTITIONS


def test_committed_transactions_are_read_and_aborted_ones_are_not(cluster: Cluster) -> None:
    producer = transactional(cluster, "teller")
    for number in range(20):
        producer.begin_transaction()
        write(producer, number)
        if number % 3 == 2:
            producer.flush(DEADLINE_S)
            producer.abort_transaction(DEADLINE_S)
        else:
            producer.commit_transaction(DEADLINE_S)
    assert read(cluster, TOPIC) == committed(*(number for number in range(20) if number % 3 != 2))
    assert read(cluster, TOPIC, isolation="read_uncommitted") == committed(*range(20))


def test_an_open_transaction_holds_back_those_who_read_what_is_committed(cluster: Cluster) -> None:
    first, second = transactional(cluster, "first"), transactional(cluster, "second")
    first.begin_transaction()
    write(first, 1)
    first.flush(DEADLINE_S)
    second.begin_transaction()
    write(second, 2)
    second.commit_transaction(DEADLINE_S)
    assert read(cluster, TOPIC) == committed()
    first.commit_transaction(DEADLINE_S)
    wait_until(lambda: read(cluster, TOPIC) == committed(1, 2), "both are read")


def test_a_second_producer_of_the_same_id_fences_the_first(cluster: Cluster) -> None:
    first = transactional(cluster, "teller")
    first.begin_transaction()
    write(first, 1)
    first.flush(DEADLINE_S)
    second = transactional(cluster, "teller")
    second.begin_transaction()
    write(second, 2)
    second.commit_transaction(DEADLINE_S)
    with pytest.raises(KafkaException) as refused:
        first.commit_transaction(DEADLINE_S)
    assert refused.value.args[0].fatal(), refused.value
    assert read(cluster, TOPIC) == committed(2)


def test_a_transaction_over_its_time_out_is_aborted(tmp_path: Path) -> None:
    with Cluster(tmp_path, transaction_check_interval_ms=200) as cluster:
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        sleeper = transactional(cluster, "sleeper", **{"transaction.timeout.ms": 1_000})
        sleeper.begin_transaction()
        write(sleeper, 1)
        sleeper.flush(DEADLINE_S)
        other = transactional(cluster, "other")
        other.begin_transaction()
        write(other, 2)
        other.commit_transaction(DEADLINE_S)
        wait_until(lambda: read(cluster, TOPIC) == committed(2), "the sleeper's transaction is aborted")
        with pytest.raises(KafkaException):
            sleeper.commit_transaction(DEADLINE_S)


def transform(cluster: Cluster, producer: Producer, consumer: Consumer, count: int) -> list[Message]:
    """Copy up to `count` records of `SOURCE` to `TOPIC` in one transaction, with the group's offsets."""
    messages = consumer.consume(count, DEADLINE_S)
    for message in messages:
        assert message.error() is None, message.error()
    if messages:
        producer.begin_transaction()
        for message in messages:
            producer.produce(TOPIC, value_of(message), partition=place_of(message)[1])
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), DEADLINE_S
        )
    return messages


def source_consumer(cluster: Cluster) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "copier",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            **QUIET,
        }
    )
    consumer.subscribe([SOURCE])
    return consumer


def fill_source(cluster: Cluster, count: int) -> list[Any]:
    """`count` records for each partition of `SOURCE`; returns what each holds."""
    create_topic(cluster.bootstrap, SOURCE, PARTITIONS)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, **QUIET})
    for number in range(count):
        for partition in range(PARTITIONS):
            producer.produce(SOURCE, b"%d-%d" % (partition, number), partition=partition)
    assert producer.flush(DEADLINE_S) == 0
    return [[b"%d-%d" % (partition, number) for number in range(count)] for partition in range(PARTITIONS)]


def test_offsets_are_committed_with_the_records_or_not_at_all(cluster: Cluster) -> None:
    """Half of the transactions are aborted, and their consumer starts again from what is committed."""
    wanted = fill_source(cluster, 40)
    producer = transactional(cluster, "copier")
    copied = rounds = 0
    consumer = source_consumer(cluster)
    try:
        while copied < 40 * PARTITIONS:
            messages = transform(cluster, producer, consumer, 15)
            rounds += 1
            if rounds % 2:
                producer.abort_transaction(DEADLINE_S)
                consumer.close()
                consumer = source_consumer(cluster)
            else:
                producer.commit_transaction(DEADLINE_S)
                copied += len(messages)
    finally:
        consumer.close()
    assert read(cluster, TOPIC) == wanted


def test_transactions_go_on_while_all_their_partitions_move(cluster: Cluster) -> None:
    """Data, offsets and the coordinator's state move in the middle of transactions."""
    wanted = fill_source(cluster, 120)
    producer = transactional(cluster, "copier")
    consumer = source_consumer(cluster)
    copied = rounds = 0
    try:
        while copied < 120 * PARTITIONS:
            messages = transform(cluster, producer, consumer, 12)
            rounds += 1
            for topic in (TOPIC, OFFSETS_TOPIC, TRANSACTION_TOPIC):
                record = cluster.image.topic(topic)
                assert record is not None
                for index in range(rounds % 3, min(record.partitions, 12), 3):
                    cluster.move(topic, index, cluster.leader(topic, index) % 3 + 1)
            producer.commit_transaction(DEADLINE_S)
            copied += len(messages)
    finally:
        consumer.close()
    assert rounds >= 10
    assert read(cluster, TOPIC) == wanted


async def _with_aiokafka(bootstrap: str) -> None:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id="aiokafka")
    await producer.start()
    try:
        for number in range(9):
            await producer.begin_transaction()
            for partition in range(PARTITIONS):
                await producer.send_and_wait(TOPIC, b"%d" % number, partition=partition)
            await (producer.abort_transaction() if number % 3 == 2 else producer.commit_transaction())
    finally:
        await producer.stop()


def _with_kafka_python(bootstrap: str) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id="kafka-python", selector=ClosingSelector)
    producer.init_transactions()
    try:
        for number in range(9):
            producer.begin_transaction()
            for partition in range(PARTITIONS):
                producer.send(TOPIC, b"%d" % number, partition=partition)
            if number % 3 == 2:
                producer.flush(DEADLINE_S)
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    finally:
        producer.close(DEADLINE_S)


@pytest.mark.gate_cases("aiokafka")
@pytest.mark.parametrize("client", ["aiokafka", "kafka-python"])
def test_other_clients_commit_and_abort(cluster: Cluster, client: str) -> None:
    if client == "aiokafka":
        asyncio.run(_with_aiokafka(cluster.bootstrap))
    else:
        _with_kafka_python(cluster.bootstrap)
    assert read(cluster, TOPIC) == committed(*(number for number in range(9) if number % 3 != 2))
