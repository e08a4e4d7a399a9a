"""Producers that write to topics which their first request creates: every record is stored, in order, without retries.

A topic is announced when its partitions are open, and a request that still comes too early waits a little. So a
producer that hears of no error (acks=0), or does not retry, loses nothing; and batches that were sent one behind the
other are not overtaken by the ones after them because the first was refused.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from tests.support.clients import DEADLINE_S, value_of
from tests.support.cluster_process import eventually, tidelog_json, up_cluster
from tests.support.kafka_python import ClosingSelector

TOPICS = 60
RECORDS = 10
"""To one partition of each topic, each in a batch of its own."""
VALUES = [b"%d" % number for number in range(RECORDS)]

Produce = Callable[[str, list[str]], list[str]]
"""Takes bootstrap address and topics; writes `VALUES` to partition 0 of each; returns the errors."""


@pytest.fixture(scope="module", params=[1, 3], ids=["one broker", "three brokers"])
def bootstrap(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with up_cluster(tmp_path_factory.mktemp("cluster"), request.param) as cluster:
        if request.param > 1:
            eventually(lambda: _are_followed(cluster.bootstrap))
        yield cluster.bootstrap


def _are_followed(bootstrap: str) -> bool:
    """Whether each broker of a new cluster has followers: until then acks=all is answered with NOT_ENOUGH_REPLICAS."""
    led = [row for row in tidelog_json(bootstrap, "replica-set", "list") if row["master"] is not None]
    return len(led) > 1 and all(len(row["in_sync"]) > 1 for row in led)


def _rdkafka(acks: str) -> Produce:
    def produce(bootstrap: str, topics: list[str]) -> list[str]:
        errors: list[str] = []

        def told(error: Any, message: Message) -> None:
            if error is not None:
                errors.append(f"{message.topic()}: {error}")

        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": acks,
                "linger.ms": 0,
                "batch.num.messages": 1,
                "max.in.flight.requests.per.connection": 5,
            }
        )
        for number, topic in enumerate(topics):
            for value in VALUES:
                producer.produce(topic, value, partition=0, on_delivery=told)
            producer.poll(0)
            if number >= TOPICS // 2:  # the first half all at once, the second half one by one
                assert producer.flush(DEADLINE_S) == 0
        assert producer.flush(DEADLINE_S) == 0
        return errors

    return produce


def _kafka_python(bootstrap: str, topics: list[str]) -> list[str]:
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=bootstrap,
        selector=ClosingSelector,
        acks="all",
        retries=0,
        enable_idempotence=False,
        batch_size=0,
        max_in_flight_requests_per_connection=5,
    )
    errors = []
    try:
        waiting = [(topic, producer.send(topic, value, partition=0)) for topic in topics for value in VALUES]
        for topic, one in waiting:
            try:
                one.get(DEADLINE_S)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is counted
                errors.append(f"{topic}: {error!r}")
    finally:
        producer.close(DEADLINE_S)
    return errors


def _aiokafka(acks: int | str) -> Produce:
    async def run(bootstrap: str, topics: list[str]) -> list[str]:
        from aiokafka import AIOKafkaProducer

        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks=acks, max_batch_size=80)
        await producer.start()
        try:
            waiting = [await producer.send(topic, value, partition=0) for topic in topics for value in VALUES]
            done = await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            await producer.stop()
        return [repr(one) for one in done if isinstance(one, BaseException)]

    return lambda bootstrap, topics: asyncio.run(run(bootstrap, topics))


CLIENTS: dict[str, Produce] = {
    "rdkafka-acks-0": _rdkafka("0"),
    "rdkafka-acks-all": _rdkafka("all"),
    "kafka-python-no-retries": _kafka_python,
    "aiokafka-acks-0": _aiokafka(0),
    "aiokafka-acks-all": _aiokafka("all"),
}


def stored(bootstrap: str, topics: list[str]) -> dict[str, list[bytes]]:
    """What partition 0 of each topic holds."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False})
    try:
        found: dict[str, list[bytes]] = {}
        for topic in topics:
            place = TopicPartition(topic, 0, 0)
            _, end = consumer.get_watermark_offsets(place, timeout=DEADLINE_S)
            values = found[topic] = []
            consumer.assign([place])
            while len(values) < end:
                for message in consumer.consume(end - len(values), DEADLINE_S):
                    assert message.error() is None, message.error()
                    values.append(value_of(message))
        return found
    finally:
        consumer.close()


def judge(bootstrap: str, topics: list[str], errors: list[str]) -> None:
    """Every record is there, in the order in which it was sent, and nobody heard of an error."""
    found = stored(bootstrap, topics)
    count = sum(map(len, found.values()))
    reordered = [topic for topic, values in found.items() if values != sorted(values, key=int)]
    summary = f"{count} of {len(topics) * RECORDS} stored, {len(reordered)} topics reordered, {len(errors)} errors"
    wrong = [topic for topic, values in found.items() if values != VALUES]
    assert not wrong and not errors, f"{summary}; {wrong[:3]} {errors[:3]}"


@pytest.mark.gate_cases("three brokers-rdkafka-acks-0", "three brokers-kafka-python-no-retries")
@pytest.mark.parametrize("client", CLIENTS)
def test_new_topics_take_all_records_in_order(bootstrap: str, client: str) -> None:
    topics = [f"{client}-{number}" for number in range(TOPICS)]
    judge(bootstrap, topics, CLIENTS[client](bootstrap, topics))


@pytest.mark.gate_cases("three brokers")
def test_whoever_asks_second_is_told_no_sooner(bootstrap: str) -> None:
    """Other clients ask for the topics while one creates them; their first records are stored, too."""
    topics = [f"second-{number}" for number in range(TOPICS)]
    ready = threading.Barrier(3)

    def write() -> None:
        ready.wait()
        _rdkafka("0")(bootstrap, topics)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    count = sum(len(values) for values in stored(bootstrap, topics).values())
    assert count == 3 * TOPICS * RECORDS, f"{count} of {3 * TOPICS * RECORDS} stored"
