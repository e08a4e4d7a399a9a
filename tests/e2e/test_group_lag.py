"""The lag of consumer groups, as the metrics of a cluster's brokers tell it together."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.backends import QUIET
from tests.support.clients import wait_until
from tests.support.scrapes import targets
from tidelog.testing import LocalCluster

PARTITIONS = 4
RECORDS = 10
COMMITTED = 3


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2) as cluster:
        cluster.create_topic("t", partitions=PARTITIONS)
        producer = Producer({"bootstrap.servers": cluster.bootstrap, **QUIET})
        for partition in range(PARTITIONS):
            for _ in range(RECORDS):
                producer.produce("t", b"v", partition=partition)
        assert producer.flush(30) == 0
        yield cluster


def commit(cluster: LocalCluster, group: str) -> None:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, **QUIET})
    places = [TopicPartition("t", partition, COMMITTED) for partition in range(PARTITIONS)]
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()


def told(cluster: LocalCluster, name: str) -> list[tuple[str, dict[str, str], float]]:
    """Broker, labels and value of each series of a metric."""
    found = []
    for broker, url in targets(cluster.bootstrap).items():
        with urllib.request.urlopen(url, timeout=30) as response:
            families = text_string_to_metric_families(response.read().decode())
        found += [(broker, one.labels, one.value) for family in families for one in family.samples if one.name == name]
    return found


def lags(cluster: LocalCluster) -> dict[tuple[str, int], float]:
    """The lag by group and partition, as the query of docs/metrics.md joins it."""
    ends: dict[tuple[str, str], float] = {}
    for _, labels, value in told(cluster, "tidelog_partition_high_watermark"):
        place = (labels["topic"], labels["partition"])
        ends[place] = max(value, ends.get(place, value))
    committed = told(cluster, "tidelog_group_committed_offset")
    return {
        (labels["group"], int(labels["partition"])): ends[labels["topic"], labels["partition"]] - value
        for _, labels, value in committed
        if (labels["topic"], labels["partition"]) in ends
    }


def test_the_lag_follows_a_partition_that_moves_and_ends_with_its_group(cluster: LocalCluster) -> None:
    behind = {(group, partition): RECORDS - COMMITTED for group in "gh" for partition in range(PARTITIONS)}
    for group in "gh":
        commit(cluster, group)
    wait_until(lambda: lags(cluster) == behind, "the lag of two groups")
    ends = told(cluster, "tidelog_partition_high_watermark")
    assert {labels["topic"] for _, labels, _ in ends} == {"t"}, "not of internal topics"
    before = {int(labels["partition"]): broker for broker, labels, _ in ends}
    assert len(set(before.values())) == 2 and len(ends) == PARTITIONS

    cluster.move("t", 0)
    wait_until(lambda: lags(cluster) == behind, "the lag after a move")
    after = [
        broker for broker, labels, _ in told(cluster, "tidelog_partition_high_watermark") if labels["partition"] == "0"
    ]
    assert len(after) == 1 and after != [before[0]]

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, **QUIET})
    admin.delete_consumer_groups(["g"])["g"].result(30)
    wait_until(lambda: {group for group, _ in lags(cluster)} == {"h"}, "the end of a group")


def test_a_consumer_that_reads_on_has_no_lag_left(cluster: LocalCluster) -> None:
    commit(cluster, "g")
    config = {"bootstrap.servers": cluster.bootstrap, "group.id": "g", "auto.commit.interval.ms": 100, **QUIET}
    consumer = Consumer(config)
    try:
        consumer.subscribe(["t"])

        def is_read() -> bool:
            consumer.consume(RECORDS, 0.2)
            return lags(cluster) == {("g", partition): 0 for partition in range(PARTITIONS)}

        wait_until(is_read, "all records committed")
    finally:
        consumer.close()
