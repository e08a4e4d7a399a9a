"""Copies of a partition with a real cluster and no Spark: order, resuming, holes, other writers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from pyspark_tidelog.columns import arrow_schema, column_names
from pyspark_tidelog.jobs.kafka_range import read_range
from pyspark_tidelog.jobs.ordered import FILLER, CopiedPartition, PartitionCopy, Source, copy_partition
from pyspark_tidelog.jobs.replay import zero_timestamps
from pyspark_tidelog.jobs.topics import TopicAdmin, prepare_copy
from pyspark_tidelog.reading import DataLoss
from tests.e2e.backends import create_topic
from tests.support.cluster_process import UpCluster, up_cluster
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import NotFound, TidelogError

pytestmark = pytest.mark.processes

FLAGS = [part for each in ("log.retention_ms=-1", "upload.age_ms=3600000") for part in ("--set", each)]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as found:
        yield found


@pytest.fixture
def bootstrap(up: UpCluster) -> str:
    return up.bootstrap


@pytest.fixture
def topic(bootstrap: str, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name).replace("[", "-").replace("]", "")[:200]
    create_topic(bootstrap, name, 1)
    return name


def row(offset: int, **changes: Any) -> Row:
    found = {
        "key": b"k%d" % offset if offset % 3 else None,
        "value": b"v%d" % offset if offset % 4 else None,
        "topic": "s",
        "partition": 0,
        "offset": offset,
        "timestamp": (1_600_000_000_000 + offset) * 1_000,
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"%d" % offset}, {"key": "n", "value": None}][: offset % 3] or None,
    }
    return {**found, **changes}


def source(rows: list[Row], *, at_once: int = 7) -> Source:
    """A source that has these rows, some to a batch."""

    def read(start: int) -> Iterator[pa.RecordBatch]:
        wanted = [each for each in rows if each["offset"] >= start]
        for first in range(0, len(wanted), at_once):
            piece = wanted[first : first + at_once]
            schema = arrow_schema(column_names(include_headers=True))
            arrays = [pa.array([each[field.name] for each in piece], type=field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return read


def read(bootstrap: str, topic: str) -> list[tuple[Any, ...]]:
    """Offset, key, value, timestamp and headers of all records."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "r", "enable.partition.eof": True, "log_level": 0})
    low, _ = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=60)
    consumer.assign([TopicPartition(topic, 0, low)])
    found: list[tuple[Any, ...]] = []
    while True:
        message = consumer.poll(60)
        assert message is not None
        if message.error() is not None:
            break
        headers = message.headers() or None
        found.append((message.offset(), message.key(), message.value(), message.timestamp()[1], headers))
    consumer.close()
    return found


def as_read(rows: list[Row], first: int | None = None) -> list[tuple[Any, ...]]:
    """What `read` returns of a copy of rows: with their offsets, or with consecutive ones from `first`."""
    found = []
    for number, each in enumerate(rows):
        headers = [(one["key"], one["value"]) for one in each["headers"] or ()] or None
        offset = each["offset"] if first is None else first + number
        found.append((offset, each["key"], each["value"], each["timestamp"] // 1_000, headers))
    return found


def copying(bootstrap: str, topic: str, end: int, start: int = 0, **more: Any) -> PartitionCopy:
    settings = {"keeps_offsets": False, "kafka": {"bootstrap.servers": bootstrap}, **more}
    return PartitionCopy("s", topic, 0, start, end, **settings)


def refused(copy: PartitionCopy, rows: Source) -> str:
    with pytest.raises(TidelogError) as caught:
        copy_partition(copy, rows)
    return str(caught.value)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_copy_has_all_of_every_record_in_order(bootstrap: str, topic: str, keeps: bool) -> None:
    rows = [row(at) for at in range(500)]
    done = copy_partition(copying(bootstrap, topic, 500, keeps_offsets=keeps), source(rows))
    assert done == CopiedPartition(0, copied=500, found=0, filled=0, end=500, restamped=0)
    assert read(bootstrap, topic) == as_read(rows)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_copy_that_ended_midway_goes_on_where_it_was(bootstrap: str, topic: str, keeps: bool) -> None:
    rows = [row(at) for at in range(400)]

    def broken(start: int) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(source(rows)(start)):
            if number == 20:
                raise OSError("the source is gone")
            yield batch

    copy = copying(bootstrap, topic, 400, keeps_offsets=keeps)
    ends = [0]
    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            copy_partition(copy, broken)
        ends.append(len(read(bootstrap, topic)))
    done = copy_partition(copy, source(rows))
    assert done.found == ends[-1] and done.copied == 400 - ends[-1]
    assert read(bootstrap, topic) == as_read(rows)
    again = copy_partition(copy, source(rows))
    assert (again.copied, again.found) == (0, 400), "there is nothing left to do"


def test_a_renumbered_copy_closes_holes(bootstrap: str, topic: str) -> None:
    rows = [row(at) for at in range(100, 400, 3)]
    copy = copying(bootstrap, topic, 400, start=100)
    copy_partition(replace(copy, end=200), source([each for each in rows if each["offset"] < 200]))
    done = copy_partition(copy, source(rows))
    assert (done.found, done.copied) == (34, 66)
    assert read(bootstrap, topic) == as_read(rows, 0)


@pytest.mark.parametrize(
    ("rows", "start", "end", "hole"),
    [
        ([row(at) for at in (0, 1, 2, 5, 6)], 0, 7, "offset 3 has no record"),
        ([row(at) for at in (4, 5)], 4, 6, "offset 0 has no record"),
        ([row(at) for at in (0, 1)], 0, 4, "offset 2 has no record"),
        ([], 3, 3, "offset 0 has no record"),
    ],
    ids=["inside", "before", "behind", "all"],
)
def test_a_hole_is_refused_or_filled(
    bootstrap: str, topic: str, rows: list[Row], start: int, end: int, hole: str
) -> None:
    copy = copying(bootstrap, topic, end, start=start, keeps_offsets=True)
    told = refused(copy, source(rows))
    assert hole in told and "--fill-holes" in told
    known = {each["offset"] for each in rows}
    for _ in range(2):
        copy_partition(replace(copy, fills_holes=True), source(rows))
        found = read(bootstrap, topic)
        assert [each for each in found if each[0] in known] == as_read(rows)
        fillers = [each for each in found if each[0] not in known]
        assert [each[0] for each in fillers] == [at for at in range(start, end) if at not in known]
        assert all(each[1:3] == (None, None) and each[4] == [(FILLER, None)] for each in fillers)
    stamps = [each[3] for each in found]
    assert stamps == sorted(stamps), "a filler is no later than what follows"
    more = [*rows, row(end)]
    copy_partition(replace(copy, fills_holes=True, end=end + 1), source(more))
    assert read(bootstrap, topic)[-1] == as_read(more)[-1]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_target_with_something_else_is_refused_and_left_alone(bootstrap: str, topic: str, keeps: bool) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    for at in range(5):
        producer.produce(topic, b"mine %d" % at)
    assert producer.flush(60) == 0
    before = read(bootstrap, topic)
    copy = copying(bootstrap, topic, 10, keeps_offsets=keeps)
    for rows in ([row(at) for at in range(10)], [row(at) for at in range(3)], []):
        assert f"{topic}-0 is no copy of s" in refused(replace(copy, end=len(rows)), source(rows))
    assert "is no copy" in refused(replace(copy, start=7, fills_holes=True), source([row(at) for at in range(7, 10)]))
    assert read(bootstrap, topic) == before


@pytest.mark.parametrize("change", [{"value": b"x"}, {"key": b"x"}, {"timestamp": 7_000}, {"headers": None}])
def test_the_last_record_is_compared_as_a_whole(bootstrap: str, topic: str, change: Row) -> None:
    rows = [row(at) for at in range(12)]
    copy = copying(bootstrap, topic, 12, keeps_offsets=True)
    copy_partition(copy, source(rows))
    rows[11] |= change
    assert "offset 11" in refused(copy, source(rows))


def test_another_writer_is_noticed(bootstrap: str, topic: str) -> None:
    rows = [row(at) for at in range(2_000)]
    asked, written = threading.Event(), threading.Event()

    def slow(start: int) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(source(rows, at_once=100)(start)):
            if number == 3:
                asked.set()
                assert written.wait(60)
            yield batch

    def interfere() -> None:
        assert asked.wait(60)
        producer = Producer({"bootstrap.servers": bootstrap})
        producer.produce(topic, b"another's")
        assert producer.flush(60) == 0
        written.set()

    thread = threading.Thread(target=interfere)
    thread.start()
    told = refused(copying(bootstrap, topic, 2_000, keeps_offsets=True), slow)
    thread.join()
    assert "has another writer beside this copy" in told


def test_a_record_that_is_too_large_is_named_and_nothing_follows_it(bootstrap: str) -> None:
    create_topic(bootstrap, "small", 1, **{"max.message.bytes": "2000"})
    rows = [row(0), row(1), row(2, value=os.urandom(100_000)), row(3)]
    told = refused(copying(bootstrap, "small", 4), source(rows, at_once=1))
    assert "was not written" in told and "too large" in told and "max.message.bytes" in told
    assert [each[0] for each in read(bootstrap, "small")] in ([], [0, 1])


@pytest.mark.parametrize(
    ("changes", "configs", "told"),
    [
        ({"timestamp": 4_000_000_000_000_000}, {}, "message.timestamp.after.max.ms"),
        ({"key": None}, {"cleanup.policy": "compact"}, "compact"),
    ],
)
def test_a_record_that_the_target_never_takes_is_no_reason_to_run_again(
    bootstrap: str, changes: Row, configs: dict[str, str], told: str
) -> None:
    name = f"strict-{told}"
    create_topic(bootstrap, name, 1, **configs)
    error = refused(copying(bootstrap, name, 1), source([row(0, **changes)]))
    assert "the record for offset 0 was not written" in error
    assert told in error and "run it again" not in error


def test_a_topic_that_is_made_for_a_copy_takes_the_timestamps_that_the_source_took(bootstrap: str) -> None:
    create_topic(bootstrap, "future", 1, **{"message.timestamp.after.max.ms": str((1 << 63) - 1)})
    topics = TopicAdmin({"bootstrap.servers": bootstrap})
    prepare_copy(topics, "of-future", (1, 1), topics.configs("future"), "future")
    late = [row(0, timestamp=4_000_000_000_000_000)]
    assert copy_partition(copying(bootstrap, "of-future", 1), source(late)).copied == 1
    assert read(bootstrap, "of-future") == as_read(late)


def test_a_timestamp_of_zero_is_counted(bootstrap: str, topic: str) -> None:
    rows = [row(0, timestamp=0), row(1)]
    assert [zero_timestamps(each) for each in source(rows)(0)] == [1]
    copy = copying(bootstrap, topic, 2)
    assert copy_partition(copy, source(rows)).restamped == 1
    assert copy_partition(copy, source(rows)).found == 2


def test_a_target_that_is_not_there_is_not_created_by_the_copy(bootstrap: str) -> None:
    with pytest.raises(NotFound, match="there is no nowhere-0"):
        copy_partition(copying(bootstrap, "nowhere", 1), source([row(0)]))


def test_a_copy_goes_on_when_the_targets_leader_is_killed(up: UpCluster, topic: str) -> None:
    """`tidelog up` starts it again."""
    rows = [row(at) for at in range(900)]
    leader = ClusterConnection(up.bootstrap).metadata().topics[topic].partitions[0].leader

    def killing(start: int) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(source(rows, at_once=10)(start)):
            if number == 45:
                os.kill(up.node_pids()[leader - 1], signal.SIGKILL)
            yield batch

    settings = {"bootstrap.servers": up.bootstrap, "batch.num.messages": "10"}
    done = copy_partition(copying(up.bootstrap, topic, 900, keeps_offsets=True, kafka=settings), killing)
    assert done.copied == 900
    assert read(up.bootstrap, topic) == as_read(rows)


def test_a_range_of_any_kafka_is_read_as_rows_of_the_source(bootstrap: str, topic: str) -> None:
    rows = [row(at, topic=topic) for at in range(300)]
    copy_partition(copying(bootstrap, topic, 300), source(rows))
    settings = {"bootstrap.servers": bootstrap}

    def ranged(start: int, end: int, topic: str = topic) -> list[Row]:
        return [each for batch in read_range(settings, topic, 0, start, end) for each in batch.to_pylist()]

    found = ranged(17, 290)
    for each in found:
        each["timestamp"] = round(each["timestamp"].timestamp() * 1_000) * 1_000
    assert found == rows[17:290]
    assert ranged(5, 5) == []
    with pytest.raises(DataLoss):
        ranged(400, 401)
    with pytest.raises(NotFound, match="there is no nowhere-0"):
        ranged(0, 1, "nowhere")
