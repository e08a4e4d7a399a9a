"""The sink with `exactlyOnce` at real brokers: its tasks, commit and abort, without Spark; and the queries of a real
Spark that are run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql.types import StructType

from pyspark_tidelog.decision_topic import DecisionTopic
from pyspark_tidelog.decisions import Attempt, Query
from pyspark_tidelog.exactly_once import ExactlyOnceWriter, PreparedRows, stream_writer, write_attempt
from pyspark_tidelog.sink_options import WriteOptions, write_options
from pyspark_tidelog.transactions import TransactionCalls
from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, Spark
from tests.support.cluster_process import UpCluster, up_cluster
from tidelog.runtime.errors import ConfigError, Fenced, InvalidInput, Unavailable

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("spark")]
SCHEMA = StructType().add("value", "string")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    flags = [*FLAGS, "--set", "group.transaction_two_phase_commit=true"]
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=flags) as cluster:
        yield cluster


def values(up: UpCluster, topic: str, partitions: int = 2) -> list[str]:
    """What a consumer reads that sees committed transactions only, up to the high watermark; that is the last stable
    offset, or the partition is blocked."""
    settings = {"bootstrap.servers": up.bootstrap, "group.id": "r", "enable.auto.commit": False}
    consumer: Any = Consumer({**settings, "isolation.level": "read_committed", "enable.partition.eof": True})
    found = []
    try:
        for partition in range(partitions):
            _, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), DEADLINE_S, cached=False)
            consumer.assign([TopicPartition(topic, partition, 0)])
            while (message := consumer.poll(DEADLINE_S)) is not None and message.error() is None:
                found.append(message.value().decode())
            assert message is not None and message.error().name() == "_PARTITION_EOF"
            stable = message.offset()
            assert stable >= high, f"partition {partition} is blocked at {stable} of {high}"
    finally:
        consumer.close()
    return sorted(found)


class Write:
    """The writes of a query to a topic of its own."""

    def __init__(self, up: UpCluster, name: str) -> None:
        create_topic(up.bootstrap, name, 2)
        self.given = {"kafka.bootstrap.servers": up.bootstrap, "topic": name, "exactlyOnce": "true"}
        self.options: WriteOptions = write_options(self.given)
        self.query = Query("tidelog-spark", f"query-of-{name}")

    def task(self, batch: int, writer: str, number: int, rows: Sequence[str]) -> PreparedRows:
        attempt = Attempt(self.query, batch, writer, number)
        return write_attempt([pa.record_batch({"value": pa.array(rows, pa.string())})], self.options, attempt)

    def writer(self) -> ExactlyOnceWriter:
        found = stream_writer(self.given, SCHEMA)
        assert isinstance(found, ExactlyOnceWriter)
        return found

    def open(self) -> list[Attempt]:
        with closing(TransactionCalls(self.given["kafka.bootstrap.servers"])) as calls:
            return calls.open(self.query)


def test_the_rows_of_a_micro_batch_are_there_once_when_it_is_committed(up: UpCluster) -> None:
    write = Write(up, "once")
    first, second = write.task(0, "a", 0, ["1", "2", "3"]), write.task(0, "a", 1, ["4"])
    lost = write.task(0, "a", 2, ["4"])
    nothing = write.task(0, "a", 3, [])
    assert nothing.pair is None and (first.rows, second.rows, nothing.rows) == (3, 1, 0)
    assert len(write.open()) == 3
    write.writer().commit([first, second, nothing, None], 0)
    assert values(up, "once") == ["1", "2", "3", "4"]
    assert write.open() == []
    with closing(TransactionCalls(up.bootstrap)) as calls:
        assert first.pair is not None and lost.pair is not None
        calls.commit(first.attempt, first.pair, is_again=True)
        with pytest.raises(Fenced, match="its rows are lost"):
            calls.commit(lost.attempt, lost.pair, is_again=False)
    assert values(up, "once") == ["1", "2", "3", "4"]


def test_a_batch_that_runs_again_is_not_written_again(up: UpCluster) -> None:
    write = Write(up, "again")
    write.writer().commit([write.task(0, "a", 0, ["1", "2"])], 0)
    late = write.task(0, "b", 0, ["1"])
    assert late.pair is None
    write.writer().commit([late, write.task(0, "b", 1, ["2"])], 0)
    write.writer().commit([write.task(1, "c", 0, ["3"])], 1)
    assert values(up, "again") == ["1", "2", "3"]
    with pytest.raises(Fenced, match="micro-batch 0 cannot be committed"):
        write.writer().commit([write.task(0, "d", 0, ["1", "2"])], 0)
    assert len(DecisionTopic(write.query, write.options.connection).read().made(1).transactions) == 1  # type: ignore[union-attr]


def test_an_aborted_batch_leaves_nothing(up: UpCluster) -> None:
    write = Write(up, "aborted")
    write.writer().abort([write.task(0, "a", 0, ["1", "2"]), None], 0)
    assert values(up, "aborted") == [] and write.open() == []
    assert write.task(0, "a", 1, ["1"]).pair is None
    write.writer().commit([write.task(0, "b", 0, ["1", "2"])], 0)
    assert values(up, "aborted") == ["1", "2"]


def test_a_task_that_fails_leaves_no_open_transaction(up: UpCluster) -> None:
    write = Write(up, "failed")

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": pa.array(["1"])})
        yield pa.record_batch({"value": pa.array(["2"]), "partition": pa.array([9], pa.int32())})

    with pytest.raises(InvalidInput, match=r"row 1 .* there is no such partition"):
        write_attempt(batches(), write.options, Attempt(write.query, 0, "a", 0))
    assert values(up, "failed") == [] and write.open() == []


@pytest.mark.long
def test_a_transaction_that_time_has_ended_fails_its_task(up: UpCluster) -> None:
    write = Write(up, "slow")
    attempt = Attempt(write.query, 0, "a", 0)

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": pa.array(["1"])})
        with closing(TransactionCalls(up.bootstrap)) as calls:  # as a time-out does
            calls.abort(attempt)

    with pytest.raises((InvalidInput, Unavailable), match=r"was aborted before|fenced|old epoch"):
        write_attempt(batches(), write.options, attempt)
    assert values(up, "slow") == [] and write.open() == []


@pytest.mark.long
def test_what_a_query_leaves_for_ever_any_producer_aborts_by_its_name(up: UpCluster) -> None:
    write = Write(up, "left")
    left = write.task(0, "a", 0, ["1"]).attempt
    assert write.open() == [left]
    producer = Producer({"bootstrap.servers": up.bootstrap, "transactional.id": left.transactional_id})
    producer.init_transactions(DEADLINE_S)
    assert values(up, "left") == [] and write.open() == []


@pytest.mark.long
def test_brokers_have_to_allow_it(tmp_path: Path) -> None:
    with up_cluster(tmp_path / "data", brokers=1, flags=FLAGS) as up:
        write = Write(up, "refused")
        with pytest.raises(ConfigError, match="do not allow two-phase commit"):
            write.task(0, "a", 0, ["1"])
        assert values(up, "refused") == []


@pytest.mark.slow
@pytest.mark.usefixtures("java_runtime")
def test_a_query_of_spark_is_exactly_once_when_its_last_batch_runs_again(
    up: UpCluster, spark: Spark, tmp_path: Path
) -> None:
    create_topic(up.bootstrap, "stream", 2)
    options = {"kafka.bootstrap.servers": up.bootstrap, "topic": "stream", "exactlyOnce": "true"}
    checkpoint = tmp_path / "checkpoint"
    columns = ["cast(value as string) as value"]
    arguments = {"rows": 10, "columns": columns, "options": options, "checkpoint": str(checkpoint)}

    def stream() -> int:
        told = spark.ask(call="tests.pyspark_tidelog.sink_steps:stream", **{"with": arguments})
        assert "ok" in told, told["error"]
        return int(told["ok"])

    stream()
    last = stream()
    (checkpoint / "commits" / str(last)).unlink()  # as if the driver had been killed before Spark wrote it
    (checkpoint / "commits" / f".{last}.crc").unlink()
    last = stream()
    assert sorted(int(each) for each in values(up, "stream")) == list(range(10 * (last + 1)))
