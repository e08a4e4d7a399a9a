"""`df.write` and `df.writeStream` with format `tidelog`: a real Spark, a real cluster, rows that cannot be
written, and a broker that is killed meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from tests.e2e.backends import create_topic, read_topic
from tests.e2e.test_failover import victim_of
from tests.pyspark_tidelog.harness import FLAGS, Row, Spark, World
from tests.support.cli import until
from tests.support.cluster_process import UpCluster, up_cluster

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]

NUMBERS = "select cast(id as string) as value from range(0, {0}, 1, {1})"


class Sink:
    """Writes by Spark to a cluster of three brokers that makes no topic by itself."""

    def __init__(self, spark: Spark, up: UpCluster) -> None:
        self.spark = spark
        self.up = up
        self.world = World(up)

    def options(self, **more: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.up.bootstrap, **more}

    def ask(self, step: str, **arguments: Any) -> dict[str, Any]:
        found = self.spark.ask(call=f"tests.pyspark_tidelog.sink_steps:{step}", **{"with": arguments})
        assert isinstance(found, dict)
        return found

    def write(self, sql: str, **options: str) -> None:
        told = self.ask("write", sql=sql, options=self.options(**options))
        assert "ok" in told, told["error"]

    def refusal(self, sql: str, *, mode: str = "append", **options: str) -> str:
        told = self.ask("write", sql=sql, options=self.options(**options), mode=mode)
        assert "error" in told
        return str(told["error"])

    def rows(self, topic: str) -> list[Row]:
        return self.spark.read(self.world.options(subscribe=topic, includeHeaders="true"))

    def values(self, topic: str, partitions: int = 1) -> list[int]:
        """The values of a topic, which are numbers, in their order."""
        return sorted(int(row[4]) for row in read_topic(self.up.bootstrap, topic, partitions))


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sink]:
    flags = [*FLAGS, "--set", "kafka.auto_create_topics=false"]
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=3, flags=flags) as up:
        spark = Spark(tmp_path_factory.mktemp("spark"))
        try:
            yield Sink(spark, up)
        finally:
            spark.close()


def in_hex(text: str | None) -> str | None:
    return None if text is None else text.encode().hex()


@pytest.mark.long
def test_rows_are_in_the_topics_as_they_were_written(sink: Sink) -> None:
    create_topic(sink.up.bootstrap, "a", 3)
    create_topic(sink.up.bootstrap, "b", 1)
    sink.write("""
        select /*+ COALESCE(1) */ * from values
          ('a', 2, 'k1', 'v1', array(struct('h' as key, X'00ff' as value), struct('h' as key, null as value))),
          ('a', 2, null, 'v2', null),
          ('a', 2, '',   '',   array()),
          ('a', 2, 'k4', null, array(struct('ü' as key, X'' as value))),
          ('b', null, 'k5', 'v5', null)
        as t(topic, partition, key, value, headers)""")
    pairs = [[{"key": "h", "value": "00ff"}, {"key": "h", "value": None}], None, None, [{"key": "ü", "value": ""}]]
    expected = zip((2,) * 4, ("k1", None, "", "k4"), ("v1", "v2", "", None), pairs, strict=True)
    found = [(row["partition"], row["key"], row["value"], row["headers"]) for row in sink.rows("a")]
    assert found == [(at, in_hex(key), in_hex(value), headers) for at, key, value, headers in expected]
    assert [(row["key"], row["value"]) for row in sink.rows("b")] == [(in_hex("k5"), in_hex("v5"))]
    sink.write("select topic, cast(value as binary) value from values ('a', 'v6') as t(topic, value)", topic="b")
    assert [row["value"] for row in sink.rows("b")] == [in_hex("v5"), in_hex("v6")]


@pytest.mark.long
def test_what_is_read_is_written_as_it_is(sink: Sink) -> None:
    create_topic(sink.up.bootstrap, "from", 2)
    create_topic(sink.up.bootstrap, "to", 2)
    for partition in range(2):
        sink.world.produce("from", partition, 0, 70)
    source = {name: str(value) for name, value in sink.world.options(subscribe="from", includeHeaders="true").items()}
    told = sink.ask("copy", source=source, options=sink.options(topic="to"), drop=[])
    assert told == {"ok": None}
    same = ("partition", "offset", "key", "value", "headers")
    assert [[row[name] for name in same] for row in sink.rows("to")] == [
        [row[name] for name in same] for row in sink.rows("from")
    ]


@pytest.mark.long
def test_a_stream_goes_on_at_its_checkpoint(sink: Sink, tmp_path: Path) -> None:
    create_topic(sink.up.bootstrap, "stream", 2)
    asked = {
        "rows": 500,
        "columns": ["cast(value as string) value", "cast(value as string) key"],
        "options": sink.options(topic="stream"),
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    for batch in range(2):
        assert sink.ask("stream", **asked) == {"ok": batch}
        assert sink.values("stream", 2) == list(range(500 * (batch + 1)))


@pytest.mark.long
def test_a_micro_batch_that_failed_is_written_again_when_it_can_be(sink: Sink, tmp_path: Path) -> None:
    create_topic(sink.up.bootstrap, "exists", 1)
    asked = {
        "rows": 100,
        "columns": ["cast(value as string) value", "if(value < 50, 'exists', 'comes-later') topic"],
        "options": sink.options(**{"kafka.topic.metadata.propagation.max.ms": "1000"}),
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    assert "there is no such topic" in sink.ask("stream", **asked)["error"]
    create_topic(sink.up.bootstrap, "comes-later", 1)
    assert sink.ask("stream", **asked) == {"ok": 1}, "the micro-batch that failed, and one more"
    assert sink.values("comes-later") == list(range(50, 200))
    assert set(sink.values("exists")) == set(range(50)), "at least once"


@pytest.mark.long
def test_output_mode_complete_appends_the_whole_result_each_time(sink: Sink, tmp_path: Path) -> None:
    create_topic(sink.up.bootstrap, "complete", 1)
    asked = {
        "rows": 9,
        "columns": ["cast(count as string) value"],
        "options": sink.options(topic="complete"),
        "checkpoint": str(tmp_path / "checkpoint"),
        "mode": "complete",
    }
    assert [sink.ask("stream", **asked) for _ in range(2)] == [{"ok": 0}, {"ok": 1}]
    assert sink.values("complete") == [3, 3, 3, 6, 6, 6]


def test_what_cannot_be_written_at_all_is_refused_before_the_first_task(sink: Sink) -> None:
    one = NUMBERS.format(1, 1)
    assert '.mode("append")' in sink.refusal(one, topic="a", mode="overwrite")
    assert "ErrorIfExists" in sink.refusal(one, topic="a", mode="error")
    assert "No such configuration property" in sink.refusal(one, topic="a", **{"kafka.no.such": "1"})


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("if(id = 700, repeat('x', 2000000), '') value, 'rows' topic", "row 700 (topic rows): it is too large"),
        ("'' value, if(id = 700, 'absent', 'rows') topic", "row 700 (topic absent): there is no such topic"),
        ("'' value, if(id = 700, 'a b', 'rows') topic", "row 700 (topic a b): the topic's name is not valid"),
        ("'' value, 'rows' topic, if(id = 700, 9, 0) partition", "row 700 (topic rows, partition 9): there is no such"),
        ("'' value, cast(if(id = 700, X'ff', X'61') as string) topic", "row 700: its topic is no UTF-8"),
        (
            "if(id = 700, repeat('x', 20000), '') value, 'small' topic",
            "1 row of this task cannot be written: row 700 (",
        ),
    ],
)
def test_a_row_that_cannot_be_written_is_told_by_its_number_and_place(sink: Sink, columns: str, told: str) -> None:
    for topic, configs in (("rows", {}), ("small", {"max.message.bytes": "10000"})):
        if topic not in sink.world.connection.admin.list_topics(timeout=30).topics:
            create_topic(sink.up.bootstrap, topic, 1, **configs)
    settings = {"kafka.topic.metadata.propagation.max.ms": "1000", "kafka.batch.size": "9000"}
    found = sink.refusal(f"select {columns} from range(0, 1000, 1, 1)", **settings)
    assert told in found, found


@pytest.mark.long
def test_a_batch_that_is_too_large_for_its_topic_says_which_setting_bounds_batches(sink: Sink) -> None:
    create_topic(sink.up.bootstrap, "smaller", 1, **{"max.message.bytes": "10000"})
    found = sink.refusal(NUMBERS.format(5_000, 1), topic="smaller")
    assert "the batch it is in is larger" in found and "kafka.batch.size" in found


def test_a_broker_that_is_killed_while_a_task_writes_leaves_no_gap_and_nothing_twice(sink: Sink) -> None:
    rows, partitions = 60_000, 6
    create_topic(sink.up.bootstrap, "killed", partitions)
    sql = f"select cast(id as string) value from range(0, {rows}, 1, 40)"
    told: list[dict[str, Any]] = []
    asked = {"sql": sql, "options": sink.options(topic="killed")}
    writing = threading.Thread(target=lambda: told.append(sink.ask("write", **asked)))
    writing.start()
    try:
        until(lambda: _written(sink, partitions) > rows // 20)
        _, pid, _ = victim_of(sink.up)
        assert writing.is_alive(), "or nothing would be killed while a task writes"
        os.kill(pid, signal.SIGKILL)
    finally:
        writing.join()
    assert told == [{"ok": None}]
    assert sink.values("killed", partitions) == list(range(rows))


def _written(sink: Sink, partitions: int) -> int:
    from confluent_kafka.admin import OffsetSpec

    spec: Any = OffsetSpec
    asked = {TopicPartition("killed", at): spec.latest() for at in range(partitions)}
    found = sink.world.connection.admin.list_offsets(asked, request_timeout=30)
    return sum(int(each.result(30).offset) for each in found.values())
