"""`spark.read.format("tidelog")` with a real Spark, a real cluster, and what happens between planning and reading."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition

from tests.e2e.backends import create_topic
from tests.support.cli import Cli, until
from tests.support.cluster_process import UpCluster, up_cluster
from tidelog.cli.client import ClusterConnection

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs a Java runtime"),
]

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "log.retention_ms=-1",
    "log.retention_check_interval_ms=500",
    "upload.delete_delay_ms=100",
    "upload.age_ms=3600000",
    "clean.enabled=false",
    "compaction.enabled=false",
)
FLAGS = [part for each in SETTINGS for part in ("--set", each)]
ANSWER_S = 300.0
Row = dict[str, Any]


class Spark:
    """A driver in a process of its own, as a user's would be."""

    def __init__(self, directory: Path, *, more: Mapping[str, str] = MappingProxyType({}), path: str = "") -> None:
        """`more`: settings; `path`: a folder with another PySpark than the tests' own."""
        settings = {
            "spark.master": "local[2]",
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.local.dir": str(directory / "local"),
            "spark.sql.python.filterPushdown.enabled": "true",
            "spark.task.maxFailures": "1",
            **more,
        }
        places = os.pathsep.join(filter(None, (path, str(ROOT))))
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": places}
        self._log = (directory / "spark.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pyspark_tidelog.spark_child", *(f"{k}={v}" for k, v in settings.items())],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> Any:
        assert self._process.stdout is not None
        watch = threading.Timer(ANSWER_S, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        assert line, f"Spark has ended: {Path(self._log.name).read_text()[-3_000:]}"
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._line()

    def plan(self, options: dict[str, object], where: str = "") -> int:
        told = self.ask(plan={name: str(value) for name, value in options.items()}, where=where)
        assert "ok" in told, told["error"]
        return int(told["ok"])

    def read(self, options: dict[str, object] | None = None) -> list[Row]:
        """Rows by partition and offset."""
        if options is not None:
            self.plan(options)
        told = self.ask(read=True)
        assert "ok" in told, told["error"]
        return sorted(told["ok"], key=lambda row: (row["topic"], row["partition"], row["offset"]))

    def refusal(self, options: dict[str, object]) -> str:
        told = self.ask(plan={name: str(value) for name, value in options.items()})
        return str(told["error"]) if "error" in told else str(self.ask(read=True)["error"])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._process.stdout.close()
        self._log.close()


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    found = Spark(tmp_path_factory.mktemp("spark"))
    yield found
    found.close()


class World:
    """A cluster, and what was written to it."""

    def __init__(self, up: UpCluster) -> None:
        self.bootstrap = up.bootstrap
        self.cli = Cli(up.bootstrap)
        self.connection = ClusterConnection(up.bootstrap)
        self.token = self.cli("cluster", "read-token").text.strip()
        self._bucket = up.data_dir / "bucket"
        assert self._bucket.is_dir()

    def options(self, **more: object) -> dict[str, object]:
        return {"kafka.bootstrap.servers": self.bootstrap, "readToken": self.token, **more}

    def produce(self, topic: str, partition: int, first: int, count: int, **settings: object) -> None:
        """Records that tell their offsets: some without key, value or headers."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5, **settings})
        for at in range(first, first + count):
            headers: list[tuple[str, str | bytes | None]] = [("h", b"%d" % at), ("empty", None)]
            producer.produce(
                topic,
                partition=partition,
                key=None if at % 5 == 0 else b"k%d" % at,
                value=None if at % 7 == 0 else b"value %d of %d" % (at, partition) * 3,
                headers=headers[: at % 3],
                timestamp=1_700_000_000_000 + at,
            )
        assert producer.flush(60) == 0

    def upload(self) -> None:
        for node in self.connection.get("/brokers")["brokers"]:
            self.connection.at(node["admin_url"]).post("/upload")

    def objects(self, topic: str) -> set[int]:
        """Ids of the objects that hold a topic's records."""
        return {each[0] for each in self._found(topic)["slices"]}

    def _found(self, topic: str) -> dict[str, Any]:
        question = {"ranges": [{"topic": topic, "partition": 0}]}
        (row,) = self.connection.post("/slices", question)["ranges"]
        return dict(row)

    def end_leases(self) -> None:
        """End the leases of Spark's reads, as if they had not been renewed."""
        for lease in self.cli("lease", "list", "--format", "json").json():
            assert lease["holder"].startswith("spark")
            self.cli("lease", "end", lease["id"])

    def wait_deleted(self, objects: set[int]) -> None:
        """Wait until objects are not in the bucket any more."""
        until(lambda: not any(list(self._bucket.rglob(f"{each:016x}")) for each in objects))

    def compact(self) -> None:
        for node in self.connection.get("/brokers")["brokers"]:
            at = self.connection.at(node["admin_url"])
            while [each for each in at.post_lines("/compaction?eager=true") if each["event"] == "task"]:
                pass

    def delete_records(self, topic: str, offset: int) -> None:
        place = TopicPartition(topic, 0, offset)
        self.connection.admin.delete_records([place])[place].result(60)

        def is_trimmed() -> bool:
            self.upload()
            return bool(self._found(topic)["log_start"] == offset)

        until(is_trimmed)


def expected(topic: str, partition: int, first: int, count: int, *, headers: bool = True) -> list[Row]:
    rows: list[Row] = []
    for at in range(first, first + count):
        row: Row = {
            "key": None if at % 5 == 0 else (b"k%d" % at).hex(),
            "value": None if at % 7 == 0 else (b"value %d of %d" % (at, partition) * 3).hex(),
            "topic": topic,
            "partition": partition,
            "offset": at,
            "timestamp": 1_700_000_000_000 + at,
            "timestampType": 0,
        }
        if headers:
            pairs = [("h", (b"%d" % at).hex()), ("empty", None)][: at % 3]
            row["headers"] = [{"key": key, "value": value} for key, value in pairs] or None
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Topic `t`: 900 records in each of two partitions, in several objects and codecs, and 100 in the tail of one."""
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as up:
        found = World(up)
        create_topic(up.bootstrap, "t", 2)
        for number, codec in enumerate(("none", "gzip", "snappy", "lz4", "zstd", "none")):
            for partition in range(2):
                found.produce("t", partition, 150 * number, 150, **{"compression.type": codec})
            found.upload()
        found.produce("t", 1, 900, 100)
        yield found


def test_a_topic_is_read_with_all_that_is_in_it(spark: Spark, world: World) -> None:
    tasks = spark.plan(world.options(subscribe="t", includeHeaders="true", maxBytesPerTask=5_000))
    assert tasks > 6, "many tasks to a partition, and one for the tail"
    assert spark.read() == [*expected("t", 0, 0, 900), *expected("t", 1, 0, 1_000)]
    assert spark.plan(world.options(subscribe="t")) == 3
    assert spark.read() == [*expected("t", 0, 0, 900, headers=False), *expected("t", 1, 0, 1_000, headers=False)]


def test_what_is_to_be_read_can_be_said_in_every_way_of_sparks_kafka_source(spark: Spark, world: World) -> None:
    def offsets(**more: object) -> list[tuple[int, int, int]]:
        """First and last offset, and the number of rows, of each partition."""
        found: dict[int, list[int]] = {}
        for row in spark.read(world.options(**more)):
            found.setdefault(row["partition"], []).append(row["offset"])
        return [(mine[0], mine[-1], len(mine)) for _, mine in sorted(found.items())]

    assert offsets(subscribePattern="t|nothing") == [(0, 899, 900), (0, 999, 1_000)]
    assert offsets(assign='{"t": [1]}') == [(0, 999, 1_000)]
    assert offsets(subscribe="t", tail="skip") == [(0, 899, 900), (0, 899, 900)]
    some = {"startingOffsets": '{"t": {"0": 77, "1": -2}}', "endingOffsets": '{"t": {"0": 301, "1": -1}}'}
    assert offsets(subscribe="t", **some) == [(77, 300, 224), (0, 999, 1_000)]
    at = {"startingTimestamp": 1_700_000_000_500, "endingTimestamp": 1_700_000_000_850}
    assert offsets(subscribe="t", **at) == [(500, 849, 350), (500, 849, 350)]
    late = {"startingTimestamp": 1_700_000_000_950, "startingOffsetsByTimestampStrategy": "latest"}
    assert offsets(subscribe="t", **late) == [(950, 999, 50)]
    where = "partition = 1 and offset >= 880 and offset < 903"
    assert spark.plan(world.options(subscribe="t"), where) == 2
    assert [row["offset"] for row in spark.read()] == list(range(880, 903))
    where = "timestamp >= timestamp_millis(1700000000890) and topic = 't'"
    assert spark.plan(world.options(subscribe="t"), where) == 3
    assert len(spark.read()) == 10 + 110


def test_nothing_to_read_is_no_rows(spark: Spark, world: World) -> None:
    create_topic(world.bootstrap, "empty", 2)
    assert spark.read(world.options(subscribe="empty")) == []
    assert spark.read(world.options(subscribePattern="no-such-.*")) == []
    assert spark.plan(world.options(subscribe="t"), "partition = 17") <= 1
    assert spark.read() == []


def test_a_wrong_token_a_wrong_topic_and_a_misspelt_option_say_what_to_do(spark: Spark, world: World) -> None:
    assert "tidelog cluster read-token" in spark.refusal(world.options(subscribe="t", readToken="wrong"))
    assert "there is no topic 'u'" in spark.refusal(world.options(subscribe="u"))
    assert "did you mean startingOffsets?" in spark.refusal(world.options(subscribe="t", startingOffset="earliest"))
    beyond = world.options(subscribe="t", endingOffsets='{"t": {"0": 1, "1": 5000}}')
    assert "t-1 ends at offset 1000, before 5000" in spark.refusal(beyond)


def test_objects_that_are_replaced_and_deleted_after_the_plan_are_looked_up_again(spark: Spark, world: World) -> None:
    create_topic(world.bootstrap, "moved", 1)
    for number in range(4):
        world.produce("moved", 0, 50 * number, 50)
        world.upload()
    spark.plan(world.options(subscribe="moved", includeHeaders="true", maxBytesPerTask=2_000))
    objects = world.objects("moved")
    world.end_leases()
    world.compact()
    world.wait_deleted(objects)
    assert spark.read() == expected("moved", 0, 0, 200)


@pytest.mark.parametrize("fails", [True, False])
def test_records_that_are_deleted_after_the_plan_are_data_loss(spark: Spark, world: World, fails: bool) -> None:
    topic = f"deleted-{fails}".lower()
    create_topic(world.bootstrap, topic, 1)
    for number in range(2):
        world.produce(topic, 0, 50 * number, 50)
        world.upload()
    spark.plan(world.options(subscribe=topic, failOnDataLoss=str(fails).lower()))
    first = min(world.objects(topic))
    world.end_leases()
    world.delete_records(topic, 70)
    world.wait_deleted({first})
    if fails:
        told = spark.ask(read=True)
        assert f"{topic}-0: offsets 0 to 69 do not exist any more" in told["error"]
        return
    assert [row["offset"] for row in spark.read()] == list(range(70, 100))
