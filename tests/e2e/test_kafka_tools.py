"""Kafka's own tools against a cluster: what they ask is answered as they expect it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import DEADLINE_S, wait_until
from tests.support.cluster import Cluster
from tests.support.kafka_tools import KafkaTools
from tidelog.controller.model.features import METADATA_LEVELS, finalized
from tidelog.controller.model.levels import NEWEST

pytestmark = pytest.mark.servers("kafka")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("tools"), brokers=3) as found:
        yield found


@pytest.fixture
def tools(cluster: Cluster, kafka: Path) -> KafkaTools:
    return KafkaTools(kafka, cluster.bootstrap)


def described(said: str) -> dict[str, list[str]]:
    """The words of each line of `kafka-features describe`, by feature."""
    lines = [line.split() for line in said.splitlines() if line.startswith("Feature: ")]
    return {words[1]: words for words in lines}


def value(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def table(said: str) -> list[dict[str, str]]:
    """The rows of a table with a header line; columns are apart by tabs."""
    header, *rows = [[cell.strip() for cell in line.split("\t")] for line in said.splitlines() if "\t" in line]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.long
def test_kafka_features_shows_and_changes_features(tools: KafkaTools) -> None:
    found = described(tools.ask("kafka-features", "describe"))
    assert set(found) == {"metadata.version", "tidelog.level", "transaction.version"}
    metadata = found["metadata.version"]
    assert value(metadata, "SupportedMinVersion:") == "3.3-IV3"
    assert "UNKNOWN" not in metadata, metadata
    assert value(metadata, "FinalizedVersionLevel:") == value(metadata, "SupportedMaxVersion:")
    assert finalized(NEWEST, {})["metadata.version"] == METADATA_LEVELS.newest
    transactions = found["transaction.version"]
    assert [value(transactions, f"Supported{each}Version:") for each in ("Min", "Max")] == ["0", "2"]
    assert value(transactions, "FinalizedVersionLevel:") == "2"

    said = tools.ask("kafka-features", "downgrade", "--feature", "transaction.version=1")
    assert "transaction.version was downgraded to 1" in said
    lowered = described(tools.ask("kafka-features", "describe"))["transaction.version"]
    assert value(lowered, "FinalizedVersionLevel:") == "1"
    assert int(value(lowered, "Epoch:")) > int(value(transactions, "Epoch:"))
    refused = tools.ask("kafka-features", "downgrade", "--feature", "transaction.version=2", code=1)
    assert "is no downgrade" in refused
    refused = tools.ask("kafka-features", "upgrade", "--feature", "transaction.version=3", code=1)
    assert "can be at levels 0 to 2" in refused
    tools.ask("kafka-features", "upgrade", "--feature", "transaction.version=2")
    raised = described(tools.ask("kafka-features", "describe"))["transaction.version"]
    assert value(raised, "FinalizedVersionLevel:") == "2"


def test_kafka_reassign_partitions_moves_verifies_throttles_and_cancels(
    cluster: Cluster, tools: KafkaTools, tmp_path: Path
) -> None:
    tools.ask("kafka-topics", "--create", "--topic", "moved", "--partitions", "1")
    source, target = cluster.elsewhere("moved")
    plan = tmp_path / "plan.json"

    def place(broker: int) -> list[str]:
        partitions = [{"topic": "moved", "partition": 0, "replicas": [broker]}]
        plan.write_text(json.dumps({"version": 1, "partitions": partitions}))
        return ["--reassignment-json-file", str(plan)]

    throttle = ["--throttle", "1000000", "--replica-alter-log-dirs-throttle", "1000000"]
    said = tools.ask("kafka-reassign-partitions", *place(target), "--execute", *throttle)
    assert "Successfully started partition reassignment for moved-0" in said
    wait_until(lambda: cluster.leader("moved", 0) == target, "the partition has moved")
    assert any(kind == "broker" for kind, _ in cluster.image.configs), "the throttle is kept until --verify"
    said = tools.ask("kafka-reassign-partitions", *place(target), "--verify")
    assert "Reassignment of partition moved-0 is completed" in said
    assert "Clearing broker-level throttles" in said and "Clearing topic-level throttles" in said
    wait_until(lambda: not cluster.image.configs, "the throttles are gone")
    assert "throttles" in tools.ask("kafka-reassign-partitions", *place(target), "--verify"), "once more, with none set"

    cluster.bucket.failing = True  # what is not uploaded yet keeps a move going
    write(cluster, "moved", 1)
    tools.ask("kafka-reassign-partitions", *place(source), "--execute", "--throttle", "1000000")
    assert "moved-0" in tools.ask("kafka-reassign-partitions", "--list")
    said = tools.ask("kafka-reassign-partitions", *place(source), "--cancel")
    assert "Successfully cancelled partition reassignment for: moved-0" in said
    cluster.bucket.failing = False
    wait_until(lambda: not list(cluster.image.moving()), "no move is left")
    assert cluster.leader("moved", 0) == target
    wait_until(lambda: not cluster.image.configs, "the throttles are gone")


def write(cluster: Cluster, topic: str, records: int) -> None:
    """Write records, which are not uploaded at once."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    for _ in range(records):
        producer.produce(topic, b"x")
    assert producer.flush(60) == 0


@pytest.mark.long
def test_a_kafka_consumer_commits_offsets_that_the_tools_show(cluster: Cluster, tools: KafkaTools) -> None:
    tools.ask("kafka-topics", "--create", "--topic", "read", "--partitions", "2")
    write(cluster, "read", 5)
    consume = ["--topic", "read", "--group", "g", "--from-beginning", "--max-messages", "5"]
    assert tools.ask("kafka-console-consumer", *consume).split()[:5] == ["x"] * 5
    (described,) = [
        [line.split() for line in said.splitlines() if line.startswith("g ")]
        for said in [tools.ask("kafka-consumer-groups", "--describe", "--group", "g")]
    ]
    assert {line[1] for line in described} == {"read"}
    assert sum(int(line[3]) for line in described if line[3] != "-") == 5, described
    found = tools.ask("kafka-get-offsets", "--topic", "read", "--time", "latest").split()
    assert sum(int(line.rpartition(":")[2]) for line in found) == 5


@pytest.mark.long
def test_kafka_log_dirs_and_kafka_cluster(cluster: Cluster, tools: KafkaTools) -> None:
    said = tools.ask("kafka-log-dirs", "--describe", "--broker-list", "1,2,3")
    found = json.loads(said.splitlines()[-1])
    assert [broker["broker"] for broker in found["brokers"]] == [1, 2, 3]
    address = ["--bootstrap-server", cluster.bootstrap]
    assert tools.run("kafka-cluster", "cluster-id", *address).startswith("Cluster ID: ")
    refused = tools.run("kafka-cluster", "unregister", *address, "--id", "3", code=1)
    assert "broker 3 is alive" in refused or "broker 3 owns" in refused
    assert 3 in cluster.image.brokers
    refused = tools.run("kafka-cluster", "unregister", *address, "--id", "99", code=1)
    assert "there is no broker 99" in refused


@pytest.mark.long
def test_kafka_configs_changes_groups_and_loggers(cluster: Cluster, tools: KafkaTools) -> None:
    group = ["--entity-type", "groups", "--entity-name", "g"]
    said = tools.ask("kafka-configs", *group, "--alter", "--add-config", "consumer.session.timeout.ms=50000")
    assert "Completed updating config for group g." in said
    assert "consumer.session.timeout.ms=50000" in tools.ask("kafka-configs", *group, "--describe")
    tools.ask("kafka-configs", *group, "--alter", "--delete-config", "consumer.session.timeout.ms")
    assert "consumer.session.timeout.ms" not in tools.ask("kafka-configs", *group, "--describe")
    logger = ["--entity-type", "broker-loggers", "--entity-name", "2"]
    tools.ask("kafka-configs", *logger, "--alter", "--add-config", "tidelog.broker=ERROR")
    try:
        assert "tidelog.broker=ERROR" in tools.ask("kafka-configs", *logger, "--describe")
    finally:
        tools.ask("kafka-configs", *logger, "--alter", "--delete-config", "tidelog.broker")
    refused = tools.ask("kafka-configs", *logger, "--alter", "--add-config", "no.such.logger=INFO", code=1)
    assert "Invalid broker logger(s): no.such.logger" in refused, "the tool asks which loggers there are"
    refused = tools.ask("kafka-configs", *logger, "--alter", "--add-config", "tidelog.broker=LOUD", code=1)
    assert "invalid level 'LOUD' for the logger tidelog.broker" in refused


@pytest.mark.long
def test_kafka_client_metrics_keeps_subscriptions(tools: KafkaTools) -> None:
    made = ["--metrics", "org.apache.kafka.producer.", "--interval", "60000", "--match", "client_id=app-.*"]
    assert "Altered client metrics config" in tools.ask("kafka-client-metrics", "--alter", "--name", "s", *made)
    assert tools.ask("kafka-client-metrics", "--list").splitlines() == ["s"]
    said = tools.ask("kafka-client-metrics", "--describe", "--name", "s")
    assert "interval.ms=60000" in said and "client_id=app-.*" in said
    tools.ask("kafka-client-metrics", "--delete", "--name", "s")
    assert tools.ask("kafka-client-metrics", "--list") == "\n"


def test_kafka_transactions_shows_transactions_and_ends_one(cluster: Cluster, tools: KafkaTools) -> None:
    create_topic(cluster.bootstrap, "paid", 1)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": "pay-7", **QUIET})
    producer.init_transactions(DEADLINE_S)
    producer.begin_transaction()
    producer.produce("paid", b"held")
    producer.flush(DEADLINE_S)

    def ongoing() -> list[dict[str, str]]:
        return [row for row in table(tools.ask("kafka-transactions", "list")) if row["TransactionState"] == "Ongoing"]

    (row,) = ongoing()
    assert row["TransactionalId"] == "pay-7"
    assert table(tools.ask("kafka-transactions", "list", "--transactional-id-pattern", "ship-.*")) == []
    (shown,) = table(tools.ask("kafka-transactions", "describe", "--transactional-id", "pay-7"))
    assert (shown["TransactionState"], shown["TopicPartitions"]) == ("Ongoing", "paid-0")
    assert (shown["CoordinatorId"], shown["ProducerId"]) == (row["Coordinator"], row["ProducerId"])
    place = ["--topic", "paid", "--partition", "0"]
    (writer,) = table(tools.ask("kafka-transactions", "describe-producers", *place))
    assert (writer["ProducerId"], writer["CurrentTransactionStartOffset"]) == (row["ProducerId"], "0")
    assert tools.ask("kafka-get-offsets", "--topic", "paid", "--time", "latest").strip() == "paid:0:1"
    tools.ask("kafka-transactions", "abort", *place, "--start-offset", "0")
    (writer,) = table(tools.ask("kafka-transactions", "describe-producers", *place))
    assert writer["CurrentTransactionStartOffset"] == "None"
    producer.abort_transaction(DEADLINE_S)
    wait_until(lambda: not ongoing(), "the end of the transaction")
    (shown,) = table(tools.ask("kafka-transactions", "describe", "--transactional-id", "pay-7"))
    assert (shown["TransactionState"], shown["CurrentTransactionStartTimeMs"]) == ("CompleteAbort", "None")


@pytest.mark.long
def test_kafka_producer_perf_test_commits_transactions(cluster: Cluster, tools: KafkaTools) -> None:
    create_topic(cluster.bootstrap, "perf", 3)
    load = ["--topic", "perf", "--num-records", "3000", "--record-size", "100", "--throughput", "-1"]
    ending = ["--transactional-id", "perf", "--transaction-duration-ms", "20"]
    properties = f"bootstrap.servers={cluster.bootstrap}"
    said = tools.run("kafka-producer-perf-test", *load, *ending, "--producer-props", properties)
    assert "3000 records sent" in said
    arguments = ["--topic", "perf", "--from-beginning", "--max-messages", "3000", "--timeout-ms", "60000"]
    read = tools.ask("kafka-console-consumer", *arguments, "--consumer-property", "isolation.level=read_committed")
    assert "Processed a total of 3000 messages" in read
