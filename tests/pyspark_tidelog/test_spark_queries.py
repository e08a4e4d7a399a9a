"""`spark.readStream.format("tidelog")` with a real Spark: exactly once while brokers die, and the driver does."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, Spark, World, expected
from tests.support.cli import Cli, until
from tests.support.cluster_process import up_cluster
from tests.support.hot_cluster import HotCluster, hot_cluster
from tests.support.partition_load import PartitionLoad

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]
PARTITIONS = 3


def count(place: Path) -> int:
    """How many micro-batches a query has done."""
    commits = place / "checkpoint" / "commits"
    return sum(each.name.isdecimal() for each in commits.iterdir()) if commits.is_dir() else 0


def goes_on(place: Path) -> None:
    """Wait until a query has done some more micro-batches."""
    done = count(place)
    until(lambda: count(place) > done + 1)


def consumed(bootstrap: str, topic: str, ends: dict[int, int]) -> list[tuple[int, int, str]]:
    """Partition, offset and value of each record, as a Kafka client reads them."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "check", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, index, 0) for index in ends])
    found: list[tuple[int, int, str]] = []
    while len(found) < sum(ends.values()):
        for message in consumer.consume(1_000, 1.0):
            assert message.error() is None, message.error()
            index, offset, value = message.partition(), message.offset(), message.value()
            assert index is not None and offset is not None and value is not None
            found.append((index, offset, value.hex()))
    consumer.close()
    return sorted(found)


def options(hot: HotCluster, token: str) -> dict[str, object]:
    return {
        "kafka.bootstrap.servers": hot.bootstrap,
        "readToken": token,
        "subscribe": "t",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": 2_000,
        "maxBytesPerTask": 100_000,
    }


@pytest.mark.long
def test_rows_are_there_once_after_brokers_and_the_driver_were_killed(tmp_path: Path) -> None:
    place = tmp_path / "query"
    with hot_cluster(tmp_path / "hot", {"upload": {"age_ms": 1_000}}) as hot:
        create_topic(hot.bootstrap, "t", PARTITIONS)
        token = Cli(hot.bootstrap)("cluster", "read-token", "--secret-file", tmp_path / "hot" / "secret").text.strip()
        with PartitionLoad(hot.bootstrap, "t", PARTITIONS, pause_s=0.003) as load:
            load.wait_grown()
            with Spark(tmp_path / "first") as spark:
                spark.stream(options(hot, token), place, processingTime="200 milliseconds")
                goes_on(place)
                hot.kill(101)
                hot.wait_masters([101])
                goes_on(place)
                spark.kill()
            load.wait_grown()
            hot.begin(101)
            hot.ready(101)
            hot.kill(102)
            with Spark(tmp_path / "second") as spark:
                spark.stream(options(hot, token), place, processingTime="200 milliseconds")
                hot.wait_masters([102])
                goes_on(place)
                load.wait_grown()
                load.__exit__(None, None, None)
                assert load.verify(hot.bootstrap) == []
                spark.finish()
                rows = spark.written(place)
        assert [(row["partition"], row["offset"], row["value"]) for row in rows] == consumed(
            hot.bootstrap, "t", load.ends()
        )


@pytest.mark.long
def test_a_query_ends_with_what_was_there_and_its_checkpoint_is_gone_on_with(tmp_path: Path) -> None:
    place = tmp_path / "query"
    with up_cluster(tmp_path / "cluster", brokers=2, flags=FLAGS) as up:
        world = World(up)
        create_topic(world.bootstrap, "t", 1)
        given = world.options(subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger=30)
        with Spark(tmp_path / "spark") as spark:
            for number in range(3):
                world.produce("t", 0, 100 * number, 100)
                spark.stream(given, place, availableNow=True)
                spark.finish(120)
                assert spark.written(place) == expected("t", 0, 0, 100 * (number + 1), headers=False)
                world.upload()
        assert count(place) == 12
        (group,) = [
            line.split()[0] for line in world.cli("group", "list").text.splitlines() if "spark-tidelog-" in line
        ]
        (told,) = world.cli("group", "describe", group, "--format", "json").json()
        assert [(row["committed"], row["lag"]) for row in told["partitions"]] == [(300, 0)]
