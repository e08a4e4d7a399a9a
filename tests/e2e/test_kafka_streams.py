"""Kafka Streams with exactly_once_v2 against three brokers: two instances, one of which is killed under load."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import DEADLINE_S, value_of, wait_until
from tests.support.cluster_process import UpCluster, up_cluster
from tests.support.java import Java
from tests.support.topic_facts import topic_facts

pytestmark = [pytest.mark.servers("kafka_apps"), pytest.mark.slow, pytest.mark.long]
PARTITIONS = 4
APPLICATION, SOURCE, TARGET = "word-counts", "text", "counted"
ROUNDS, WORDS = 30, 40
"""Batches of input, and words in each."""


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpCluster]:
    with up_cluster(tmp_path / "data") as started:
        yield started


class Counts:
    """The committed records of the target, read on and on: the counts of each word in the order of their offsets."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "reader", "isolation.level": "read_committed", **QUIET}
        )
        self._consumer.assign([TopicPartition(TARGET, partition, 0) for partition in range(PARTITIONS)])
        self.of: dict[bytes, list[int]] = defaultdict(list)

    def total(self) -> int:
        """Read what is there; return how many records have been read."""
        for message in self._consumer.consume(1000, 0.1):
            assert message.error() is None, message.error()
            key = message.key()
            assert isinstance(key, bytes)
            self.of[key].append(int(value_of(message)))
        return sum(map(len, self.of.values()))

    def close(self) -> None:
        self._consumer.close()


@pytest.fixture
def counts(up: UpCluster) -> Iterator[Counts]:
    create_topic(up.bootstrap, SOURCE, PARTITIONS)
    create_topic(up.bootstrap, TARGET, PARTITIONS)
    found = Counts(up.bootstrap)
    yield found
    found.close()


def test_every_word_is_counted_once_although_an_instance_is_killed(
    up: UpCluster, counts: Counts, java: Java, kafka_apps: Path, tmp_path: Path
) -> None:
    program = java.program("WordCounts", kafka_apps, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
    producer, rng = Producer({"bootstrap.servers": up.bootstrap, **QUIET}), random.Random(5)
    sent: dict[bytes, int] = defaultdict(int)

    def write(rounds: int) -> None:
        for _ in range(rounds * WORDS):
            word = b"word-%d" % rng.randrange(25)
            sent[word] += 1
            producer.produce(SOURCE, word)
        assert producer.flush(DEADLINE_S) == 0

    def asked(instance: str) -> tuple[object, ...]:
        return up.bootstrap, APPLICATION, tmp_path / instance, SOURCE, TARGET

    with program.running(tmp_path / "survivor.log", *asked("survivor")) as survivor:
        survivor.wait_for("state RUNNING")
        with program.running(tmp_path / "victim.log", *asked("victim")) as victim:
            victim.wait_for("state RUNNING")
            for _ in range(ROUNDS):
                write(1)
                wait_until(lambda: counts.total() >= sum(sent.values()) - 2 * WORDS, "words are counted")
            write(ROUNDS)
            victim.kill()
        write(ROUNDS)
        wait_until(lambda: counts.total() >= sum(sent.values()), "all words are counted", 240)
        survivor.stop()
        assert not any(line.startswith("failed") for line in survivor.lines), survivor.lines
    assert dict(counts.of) == {word: list(range(1, count + 1)) for word, count in sent.items()}
    assert topic_facts(up.bootstrap, f"{APPLICATION}-counts-changelog") == (PARTITIONS, 3, "compact")
    assert topic_facts(up.bootstrap, f"{APPLICATION}-words-repartition") == (PARTITIONS, 3, "delete")
