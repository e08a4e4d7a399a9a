"""Spark's own Kafka connector, unmodified, with Tidelog in the place of Kafka: source and sink, batches and streams.

Connector and PySpark are of one version, which need not be the one that the other tests have (`localstack/install.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic, read_topic
from tests.pyspark_tidelog.harness import FLAGS, Spark, World
from tests.support.cluster_process import up_cluster

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("spark")]

KEYED = "select cast(id as string) as key, cast(id as string) as value from range(0, 400, 1, 2)"


class Connector:
    """A Spark that has both connectors, and a cluster."""

    def __init__(self, spark: Spark, world: World) -> None:
        self._spark = spark
        self.world = world

    def ask(self, step: str, **arguments: Any) -> Any:
        told = self._spark.ask(call=f"tests.pyspark_tidelog.sink_steps:{step}", **{"with": arguments})
        assert "ok" in told, told["error"]
        return told["ok"]

    def options(self, **more: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.world.bootstrap, **more}

    def placed(self, topic: str, partitions: int) -> list[tuple[bytes | None, bytes, int]]:
        """Keys, values and partitions of a topic, in the order of keys."""
        return sorted((row[3], row[4], row[0]) for row in read_topic(self.world.bootstrap, topic, partitions))


@pytest.fixture(scope="module")
def connector(spark_kafka: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connector]:
    jars = ",".join(str(each) for each in sorted((spark_kafka / "jars").iterdir()))
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as up:
        more = {"spark.jars": jars, "spark.sql.shuffle.partitions": "2"}
        spark = Spark(tmp_path_factory.mktemp("spark"), more=more, path=str(spark_kafka / "python"))
        try:
            yield Connector(spark, World(up))
        finally:
            spark.close()


@pytest.mark.long
def test_a_batch_read_has_the_columns_and_rows_of_format_tidelog(connector: Connector) -> None:
    create_topic(connector.world.bootstrap, "read", 2)
    for number, codec in enumerate(("none", "gzip", "snappy", "lz4", "zstd")):
        for partition in range(2):
            connector.world.produce("read", partition, 20 * number, 20, **{"compression.type": codec})
    connector.world.upload()
    options = connector.options(subscribe="read", includeHeaders="true")
    by_kafka = connector.ask("read", format="kafka", options=options)
    assert len(by_kafka["rows"]) == 200
    told = {"readToken": connector.world.token}
    assert connector.ask("read", format="tidelog", options={**options, **told}) == by_kafka


@pytest.mark.long
def test_a_streaming_read_goes_on_at_its_checkpoint(connector: Connector, tmp_path: Path) -> None:
    create_topic(connector.world.bootstrap, "followed", 2)
    options = connector.options(subscribe="followed", startingOffsets="earliest", maxOffsetsPerTrigger="40")
    for round_ in range(2):
        for partition in range(2):
            connector.world.produce("followed", partition, 50 * round_, 50)
        found = connector.ask("follow", options=options, directory=str(tmp_path))
        assert found == [[partition, at] for partition in range(2) for at in range(50 * (round_ + 1))]


@pytest.mark.long
def test_a_batch_write_puts_the_rows_where_format_tidelog_puts_them(connector: Connector) -> None:
    for topic in ("by-kafka", "by-tidelog"):
        create_topic(connector.world.bootstrap, topic, 3)
        connector.ask("write", sql=KEYED, options=connector.options(topic=topic), format=topic.removeprefix("by-"))
    placed = connector.placed("by-kafka", 3)
    assert len(placed) == 400
    assert connector.placed("by-tidelog", 3) == placed


@pytest.mark.long
def test_a_streaming_write_goes_on_at_its_checkpoint(connector: Connector, tmp_path: Path) -> None:
    create_topic(connector.world.bootstrap, "streamed", 2)
    asked = {
        "rows": 100,
        "columns": ["cast(value as string) value", "array(struct('h' as key, X'00' as value)) headers"],
        "options": connector.options(topic="streamed"),
        "checkpoint": str(tmp_path / "checkpoint"),
        "format": "kafka",
    }
    for batch in range(2):
        assert connector.ask("stream", **asked) == batch
        values = sorted(int(value) for _, value, _ in connector.placed("streamed", 2))
        assert values == list(range(100 * (batch + 1)))
