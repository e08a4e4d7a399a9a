"""MirrorMaker 2 between two clusters of three brokers: topics, records, where groups go on, and each record once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.e2e.backends import QUIET, create_topic, read_topic
from tests.support.clients import DEADLINE_S, place_of, value_of, wait_until
from tests.support.cluster_process import UpCluster, up_cluster
from tests.support.committed import committed_messages
from tests.support.external import Program
from tests.support.java import Java
from tests.support.topic_facts import topic_facts

pytestmark = [pytest.mark.servers("kafka_apps"), pytest.mark.slow, pytest.mark.long]
TOPIC, MIRRORED, GROUP = "orders", "source.orders", "readers"
PARTITIONS, COUNT = 3, 200
KILLS = 3
A_POLL = 20
"""Records of a transaction, at most."""


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


def mirror_file(folder: Path, source: str, target: str, **more: str) -> Path:
    """The settings of MirrorMaker from `source` to `target`; `__` in the name of a further one stands for a dot."""
    lines = {
        "clusters": "source, target",
        "source.bootstrap.servers": source,
        "target.bootstrap.servers": target,
        "source->target.enabled": "true",
        "target->source.enabled": "false",
        "source->target.topics": TOPIC,
        "source->target.groups": GROUP,
        "refresh.topics.interval.seconds": "2",
        "refresh.groups.interval.seconds": "2",
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    settings = folder / "mirror.properties"
    settings.write_text("".join(f"{name} = {value}\n" for name, value in lines.items()))
    return settings


def mirror_maker(java: Java, kafka_apps: Path) -> Program:
    return java.main(
        "org.apache.kafka.connect.mirror.MirrorMaker", kafka_apps, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    )


def test_topics_records_and_group_offsets_arrive_at_the_other_cluster(
    clusters: tuple[UpCluster, UpCluster], java: Java, kafka_apps: Path, tmp_path: Path
) -> None:
    source, target = (each.bootstrap for each in clusters)
    settings = mirror_file(
        tmp_path,
        source,
        target,
        offset__lag__max="0",
        emit__checkpoints__interval__seconds="1",
        sync__group__offsets__enabled="true",
        sync__group__offsets__interval__seconds="1",
    )
    create_topic(source, TOPIC, PARTITIONS)
    write(source, 0, COUNT)
    with mirror_maker(java, kafka_apps).running(tmp_path / "mirror.log", settings):
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


def has_grown(bootstrap: str, before: int) -> bool:
    """Whether more than two transactions came to the target's topic since its ends were `before` in all."""
    return sum(ends(bootstrap, MIRRORED)) > before + 2 * A_POLL


def copied(bootstrap: str) -> int:
    return sum(map(len, committed_messages(bootstrap, MIRRORED, PARTITIONS)))


def contents(bootstrap: str, topic: str) -> list[list[tuple[object, object, int]]]:
    """Key, value and timestamp of each committed record by partition. Markers take offsets, so these differ."""
    return [
        [(one.key(), one.value(), one.timestamp()[1]) for one in mine]
        for mine in committed_messages(bootstrap, topic, PARTITIONS)
    ]


def test_each_record_arrives_once_although_mirror_maker_is_killed_in_the_middle(
    clusters: tuple[UpCluster, UpCluster], java: Java, kafka_apps: Path, tmp_path: Path
) -> None:
    source, target = (each.bootstrap for each in clusters)
    settings = mirror_file(
        tmp_path,
        source,
        target,
        target__exactly__once__source__support="enabled",
        source__consumer__isolation__level="read_committed",
        source__consumer__max__poll__records=str(A_POLL),
        # A worker reads its offsets past all open transactions: one that a killed worker has left holds it up.
        target__producer__transaction__timeout__ms="10000",
    )
    create_topic(source, TOPIC, PARTITIONS)
    program, in_the_middle = mirror_maker(java, kafka_apps), 0
    create_topic(target, MIRRORED, PARTITIONS)
    for number in range(KILLS):
        before = sum(ends(target, MIRRORED))
        write(source, number * COUNT, COUNT)
        with program.running(tmp_path / f"mirror-{number}.log", settings) as process:
            wait_until(partial(has_grown, target, before), "records arrive", 2 * DEADLINE_S)
            process.kill()
        in_the_middle += copied(target) < (number + 1) * COUNT * PARTITIONS
    assert in_the_middle, "no kill came before everything was copied"
    with program.running(tmp_path / "mirror-last.log", settings):
        wait_until(lambda: copied(target) >= KILLS * COUNT * PARTITIONS, "all records arrive", 2 * DEADLINE_S)
    assert contents(target, MIRRORED) == contents(source, TOPIC)
