"""Kafka's own Java client with transactions against three brokers: atomic, fenced, with offsets, of each version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import DEADLINE_S
from tests.support.cluster_process import UpCluster, up_cluster
from tests.support.external import Program
from tests.support.java import Java
from tests.support.kafka_tools import KafkaTools

pytestmark = [pytest.mark.servers("kafka"), pytest.mark.slow]
PARTITIONS = 3


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    with up_cluster(tmp_path_factory.mktemp("java") / "data") as started:
        yield started


@pytest.fixture(scope="module")
def client(java: Java, kafka: Path) -> Program:
    return java.program("TransactionalClient", kafka)


def read(client: Program, bootstrap: str, topic: str, isolation: str = "read_committed") -> list[list[str]]:
    """The values of each partition, as the Java consumer reads them."""
    found: list[list[str]] = [[] for _ in range(PARTITIONS)]
    for line in client.run("read", bootstrap, topic, PARTITIONS, isolation):
        partition, value = line.split()
        found[int(partition)].append(value)
    return found


def epochs(lines: list[str]) -> tuple[int, int]:
    """The producer's epochs before and after its transactions, of one producer id."""
    before, after = (line.split() for line in lines)
    assert before[-1] == after[-1], lines
    return int(before[2]), int(after[2])


def test_what_is_committed_is_read_and_a_fenced_producer_is_refused(up: UpCluster, client: Program) -> None:
    create_topic(up.bootstrap, "accounts", PARTITIONS)
    before, after = epochs(client.run("write", up.bootstrap, "teller", "accounts", PARTITIONS, 9))
    assert after == before + 9, "transactions of version 2 have an epoch each (KIP-890)"
    committed = [str(number) for number in range(9) if number % 3 != 2]
    assert read(client, up.bootstrap, "accounts") == [committed] * PARTITIONS
    everything = [[str(number) for number in range(9)]] * PARTITIONS
    assert read(client, up.bootstrap, "accounts", "read_uncommitted") == everything

    create_topic(up.bootstrap, "fenced", PARTITIONS)
    refused = client.run("fence", up.bootstrap, "taken", "fenced")
    assert refused in (["refused ProducerFencedException"], ["refused InvalidProducerEpochException"])
    assert read(client, up.bootstrap, "fenced") == [["second"], [], []]


def fill(bootstrap: str, topic: str, count: int) -> list[list[str]]:
    """`count` records for each partition of a new topic; returns what each holds."""
    create_topic(bootstrap, topic, PARTITIONS)
    producer = Producer({"bootstrap.servers": bootstrap, **QUIET})
    values = [[f"{partition}-{number}" for number in range(count)] for partition in range(PARTITIONS)]
    for partition, each in enumerate(values):
        for value in each:
            producer.produce(topic, value.encode(), partition=partition)
    assert producer.flush(DEADLINE_S) == 0
    return values


@pytest.mark.long
def test_records_are_copied_once_although_copiers_abort_and_are_killed(
    up: UpCluster, client: Program, tmp_path: Path
) -> None:
    """Consume, transform, produce with sendOffsetsToTransaction; two copiers are killed in the middle."""
    wanted = fill(up.bootstrap, "orders", 600)
    create_topic(up.bootstrap, "copied", PARTITIONS)
    asked = ("copy", up.bootstrap, "copier", "orders", "copied", "copiers")
    for victim in range(2):
        with client.running(tmp_path / f"{victim}", *asked, 1_000_000) as process:
            process.wait_for("copied 2")
            process.kill()
    done = sum(map(len, read(client, up.bootstrap, "copied")))
    assert 0 < done < 3 * 600
    client.run(*asked, 3 * 600 - done)
    assert read(client, up.bootstrap, "copied") == wanted


@pytest.mark.long
@pytest.mark.parametrize("version", [1, 0])
def test_transactions_of_older_versions_keep_their_epoch(
    up: UpCluster, client: Program, kafka: Path, version: int
) -> None:
    tools = KafkaTools(kafka, up.bootstrap)
    topic = f"version-{version}"
    tools.ask("kafka-features", "downgrade", "--feature", f"transaction.version={version}")
    try:
        create_topic(up.bootstrap, topic, PARTITIONS)
        before, after = epochs(client.run("write", up.bootstrap, topic, topic, PARTITIONS, 9))
        assert after == before
        committed = [str(number) for number in range(9) if number % 3 != 2]
        assert read(client, up.bootstrap, topic) == [committed] * PARTITIONS
    finally:
        tools.ask("kafka-features", "upgrade", "--feature", "transaction.version=2")
