"""MirrorMaker 2 between two clusters of three brokers: topics, records, and where consumer groups go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.e2e.backends import QUIET, create_topic, read_topic
from tests.support.clients import DEADLINE_S, place_of, value_of, wait_until
from tests.support.cluster_process import UpCluster, up_cluster
from tests.support.java import Java
from tests.support.topic_facts import topic_facts

pytestmark = [pytest.mark.servers("kafka_apps"), pytest.mark.slow, pytest.mark.long]
TOPIC, MIRRORED, GROUP = "orders", "source.orders", "readers"
PARTITIONS, COUNT = 3, 200


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[tuple[UpCluster, UpCluster]]:
    with up_cluster(tmp_path / "source") as source, up_cluster(tmp_path / "target") as target:
        yield source, target


def write(bootstrap: str, first: int, count: int) -> None:
    """Records `first` … of each partition of the source's topic."""
    producer = Producer({"bootstrap.servers": bootstrap, **QUIET})
    for number in range(first, first + count):
        for partition in range(PARTITIONS):
            value = b"%d" % number
            producer.produce(TOPIC, value, b"k" + value, partition=partition, timestamp=1_700_000_000_000 + number)
    assert producer.flush(DEADLINE_S) == 0


def member(bootstrap: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **QUIET,
        }
    )


def consumed(bootstrap: str, topic: str, count: int) -> list[tuple[int, int]]:
    """Join the group, take `count` records and commit them; returns their partitions and values, sorted."""
    consumer = member(bootstrap)
    found: list[tuple[int, int]] = []

    def enough() -> bool:
        for message in consumer.consume(100, 0.1):
            assert message.error() is None, message.error()
            found.append((place_of(message)[1], int(value_of(message))))
        return len(found) >= count

    try:
        consumer.subscribe([topic])
        wait_until(enough, f"{count} records of {topic}")
        consumer.commit(asynchronous=False)
    finally:
        consumer.close()
    return sorted(found)


def committed(bootstrap: str) -> list[int]:
    """The group's offsets in the target's topic."""
    consumer = member(bootstrap)
    try:
        asked = [TopicPartition(MIRRORED, partition) for partition in range(PARTITIONS)]
        return [each.offset for each in consumer.committed(asked, timeout=DEADLINE_S)]
    finally:
        consumer.close()


def ends(bootstrap: str, topic: str) -> list[int]:
    consumer = member(bootstrap)
    try:
        parts = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        return [consumer.get_watermark_offsets(each, timeout=DEADLINE_S)[1] for each in parts]
    finally:
        consumer.close()


def test_topics_records_and_group_offsets_arrive_at_the_other_cluster(
    clusters: tuple[UpCluster, UpCluster], java: Java, kafka_apps: Path, tmp_path: Path
) -> None:
    source, target = (each.bootstrap for each in clusters)
    settings = tmp_path / "mirror.properties"
    lines = {
        "clusters": "source, target",
        "source.bootstrap.servers": source,
        "target.bootstrap.servers": target,
        "source->target.enabled": "true",
        "target->source.enabled": "false",
        "source->target.topics": TOPIC,
        "source->target.groups": GROUP,
        "offset.lag.max": "0",
        "emit.checkpoints.interval.seconds": "1",
        "sync.group.offsets.enabled": "true",
        "sync.group.offsets.interval.seconds": "1",
        "refresh.topics.interval.seconds": "2",
        "refresh.groups.interval.seconds": "2",
    }
    settings.write_text("".join(f"{name} = {value}\n" for name, value in lines.items()))
    create_topic(source, TOPIC, PARTITIONS)
    write(source, 0, COUNT)
    mirror = java.main(
        "org.apache.kafka.connect.mirror.MirrorMaker", kafka_apps, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    )
    with mirror.running(tmp_path / "mirror.log", settings):
        admin = AdminClient({"bootstrap.servers": target, **QUIET})
        wait_until(lambda: MIRRORED in admin.list_topics(timeout=DEADLINE_S).topics, "the topic arrives")
        wait_until(lambda: ends(target, MIRRORED) == [COUNT] * PARTITIONS, "its records arrive")
        taken = consumed(source, TOPIC, COUNT * PARTITIONS)
        wait_until(lambda: committed(target) == [COUNT] * PARTITIONS, "the group's offsets arrive")
        write(source, COUNT, COUNT)
        wait_until(lambda: ends(target, MIRRORED) == [2 * COUNT] * PARTITIONS, "more records arrive")
    assert read_topic(target, MIRRORED, PARTITIONS) == read_topic(source, TOPIC, PARTITIONS)
    rest = consumed(target, MIRRORED, COUNT * PARTITIONS)
    everything = [(partition, number) for partition in range(PARTITIONS) for number in range(2 * COUNT)]
    assert sorted(taken + rest) == everything, "the group went on in the other cluster where it had stopped"
    assert topic_facts(target, MIRRORED).partitions == PARTITIONS
    assert topic_facts(target, "source.checkpoints.internal") == (1, 3, "compact")
    assert topic_facts(source, "mm2-offset-syncs.target.internal") == (1, 3, "compact")
