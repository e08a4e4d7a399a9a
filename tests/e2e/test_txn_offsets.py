"""Offsets in transactions with librdkafka: three brokers, and the offsets' partitions move while one is open."""

from __future__ import annotations

from pathlib import Path

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from tests.e2e.backends import QUIET, create_topic
from tests.support.clients import wait_until
from tests.support.cluster import Cluster

OFFSETS = "__consumer_offsets"
WAIT_S = 30
MOVED = (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)


def committed(consumer: Consumer) -> list[int]:
    """The stable committed offsets: librdkafka repeats the request while one may still change, but not at a move."""
    found: list[TopicPartition] = []

    def fetched() -> bool:
        try:
            found[:] = consumer.committed([TopicPartition("t", 0), TopicPartition("t", 3)], WAIT_S)
        except KafkaException as error:
            assert error.args[0].code() in MOVED, error
        return bool(found)

    wait_until(fetched, "the coordinator answers")
    return [one.offset for one in found]


def test_offsets_are_committed_or_not_with_their_transaction_wherever_the_partition_moves(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=3) as cluster:
        servers = {"bootstrap.servers": cluster.bootstrap, **QUIET}
        create_topic(cluster.bootstrap, "t", 4)
        producer = Producer(servers | {"transactional.id": "app"})
        producer.init_transactions(WAIT_S)
        consumer = Consumer(servers | {"group.id": "g", "isolation.level": "read_committed"})
        expected = [-1001, -1001]
        for turn, is_commit in enumerate((True, False, True, True, False)):
            producer.begin_transaction()
            offsets = [TopicPartition("t", 0, 10 + turn), TopicPartition("t", 3, 20 + turn)]
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), WAIT_S)
            for partition in range(2):
                cluster.move(OFFSETS, partition, cluster.leader(OFFSETS, partition) % 3 + 1)
            if is_commit:
                producer.commit_transaction(WAIT_S)
                expected = [10 + turn, 20 + turn]
            else:
                producer.abort_transaction(WAIT_S)
            assert committed(consumer) == expected
        consumer.close()
