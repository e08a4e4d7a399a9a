"""A broker dies while the bucket is away: another one leads its partitions, and reads nothing of the bucket."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.backends import create_topic, faulty_proxy
from tests.support.hot_cluster import HotCluster, hot_cluster
from tests.support.partition_load import PartitionLoad
from tests.support.s3_servers import S3Server
from tidelog.broker.coordinators.topic import partition_for
from tidelog.chaos.faulty_s3 import Fault, FaultyS3
from tidelog.chaos.serve_cluster import eventually

PARTITIONS = 24
TOPIC = "without"
GROUP = "readers"
TRANSACTIONS = "transactions"

pytestmark = pytest.mark.slow


@pytest.fixture
def proxy(moto_server: S3Server) -> Iterator[FaultyS3[S3Server]]:
    with faulty_proxy(moto_server) as found:
        yield found


@pytest.fixture
def hot(tmp_path: Path, proxy: FaultyS3[S3Server]) -> Iterator[HotCluster]:
    server = proxy.server.settings()
    s3 = {name: getattr(server, name) for name in ("endpoint", "bucket", "access_key_id", "secret_access_key")}
    sections = {"s3": {**s3, "retry_budget_ms": 2_000}, "upload": {"age_ms": 500}}
    with hot_cluster(tmp_path / "hot", sections) as found:
        create_topic(found.bootstrap, TOPIC, PARTITIONS)
        yield found


def followed(hot: HotCluster, broker: int) -> tuple[float, float]:
    """How many partitions a broker follows, and how many of these would open there without the bucket."""
    with urllib.request.urlopen(f"{hot.admin_url(broker)}/metrics", timeout=10) as answer:
        families = {each.name: each for each in text_string_to_metric_families(answer.read().decode())}
    names = ("tidelog_followed_partitions", "tidelog_followed_partitions_ready")
    return families[names[0]].samples[0].value, families[names[1]].samples[0].value


def is_ready(hot: HotCluster, broker: int) -> bool:
    count, ready = followed(hot, broker)
    return count >= 2 * PARTITIONS // 3 and ready == count


def read_some(hot: HotCluster, count: int) -> int:
    """Read on as a member of a group, commit, and return how far the group is then."""
    settings = {"group.id": GROUP, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": hot.bootstrap, **settings})
    try:
        consumer.subscribe([TOPIC])
        got = 0
        while got < count:
            got += len(consumer.consume(count - got, 1.0))
        return sum(each.offset for each in consumer.commit(asynchronous=False) if each.offset > 0)
    finally:
        consumer.close()


def test_its_partitions_and_groups_go_on_elsewhere(hot: HotCluster, proxy: FaultyS3[S3Server]) -> None:
    with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS, pause_s=0.05) as load:
        load.wait_grown(50)
        before = read_some(hot, 200)
        eventually(lambda: all(is_ready(hot, broker) for broker in (101, 102, 103)), 60)
        proxy.fault = lambda seen: Fault(status=503)
        load.wait_grown(20)
        hot.kill(101)
        hot.wait_masters([101])
        load.wait_grown(20)
        assert read_some(hot, 300) > before
        proxy.fault = lambda seen: None
    assert load.verify(hot.bootstrap) == []


@pytest.mark.long
def test_a_follower_that_came_later_has_read_what_it_has_not_received(
    hot: HotCluster, proxy: FaultyS3[S3Server]
) -> None:
    with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS, pause_s=0.05) as load:
        load.wait_grown(50)
        for broker in (102, 103):
            hot.kill(broker)
            hot.wait_masters([broker])
            load.wait_grown(20)
            hot.begin(broker)
            hot.ready(broker)
            hot.wait_full()
        eventually(lambda: all(is_ready(hot, broker) for broker in (102, 103)), 120)
        proxy.fault = lambda seen: Fault(status=503)
        hot.kill(101)
        hot.wait_masters([101])
        load.wait_grown(20)
        proxy.fault = lambda seen: None
    assert load.verify(hot.bootstrap) == []


def commit_one(producer: Producer, number: int) -> None:
    producer.begin_transaction()
    producer.produce(TRANSACTIONS, b"%d" % number, partition=number % PARTITIONS)
    producer.commit_transaction(60)


def test_transactions_go_on_and_the_newest_records_are_read(hot: HotCluster, proxy: FaultyS3[S3Server]) -> None:
    create_topic(hot.bootstrap, TRANSACTIONS, PARTITIONS)
    ids = [f"without-{n}" for n in range(9)]
    producers = [Producer({"bootstrap.servers": hot.bootstrap, "transactional.id": each}) for each in ids]
    for each in producers:
        each.init_transactions(60)
    for number in range(2 * PARTITIONS):
        commit_one(producers[number % len(ids)], number)
    eventually(lambda: all(is_ready(hot, broker) for broker in (101, 102, 103)), 60)
    state = AdminClient({"bootstrap.servers": hot.bootstrap}).list_topics(timeout=30).topics["__transaction_state"]
    assert 101 in {state.partitions[partition_for(each, len(state.partitions))].leader for each in ids}
    proxy.fault = lambda seen: Fault(status=503)
    hot.kill(101)
    hot.wait_masters([101])
    for number in range(2 * PARTITIONS, 4 * PARTITIONS):
        commit_one(producers[number % len(ids)], number)
    consumer = Consumer({"bootstrap.servers": hot.bootstrap, "group.id": "all", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(TRANSACTIONS, each, OFFSET_BEGINNING) for each in range(PARTITIONS)])
    found: set[int] = set()
    deadline = time.monotonic() + 60
    while len(found) < 4 * PARTITIONS:
        assert time.monotonic() < deadline, f"{len(found)} are readable"
        found |= {int(message.value() or b"-1") for message in consumer.consume(1000, 1.0)}
    consumer.close()
    assert found == set(range(4 * PARTITIONS))
    proxy.fault = lambda seen: None
