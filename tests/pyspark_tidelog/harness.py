"""A real Spark and a real cluster for the tests of the data source: each in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from confluent_kafka import Producer, TopicPartition

from tests.support.bucket_files import bucket_files
from tests.support.cli import Cli, until
from tests.support.cluster_process import UpCluster
from tests.support.hot_cluster import HotCluster
from tidelog.cli.client import ClusterConnection

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "log.retention_ms=-1",
    "log.retention_check_interval_ms=500",
    "upload.delete_delay_ms=100",
    "upload.age_ms=3600000",
    "clean.enabled=false",
    "compaction.enabled=false",
    "log.cleaner_interval_ms=300",
)
FLAGS = [part for each in SETTINGS for part in ("--set", each)]
ANSWER_S = 300.0
Row = dict[str, Any]


class Spark:
    """A driver in a process of its own, as a user's would be."""

    def __init__(
        self,
        directory: Path,
        *,
        more: Mapping[str, str] = MappingProxyType({}),
        path: str = "",
        answer_s: float = ANSWER_S,
    ) -> None:
        """`more`: settings; `path`: a folder with another PySpark than the tests' own; `answer_s`: to any question."""
        self._answer_s = answer_s
        settings = {
            "spark.master": "local[2]",
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.local.dir": str(directory / "local"),
            "spark.task.maxFailures": "1",
            **more,
        }
        places = os.pathsep.join(filter(None, (path, str(ROOT))))
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": places}
        directory.mkdir(exist_ok=True)
        self._log = (directory / "spark.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pyspark_tidelog.spark_child", *(f"{k}={v}" for k, v in settings.items())],
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> Any:
        assert self._process.stdout is not None
        watch = threading.Timer(self._answer_s, self._process.kill)
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

    def plan(self, options: dict[str, object], where: str = "", *, pushes: bool = False) -> int:
        """The number of tasks; `pushes`: with filters pushed down, which is off by default."""
        told = self.ask(plan={name: str(value) for name, value in options.items()}, where=where, pushes=pushes)
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

    def stream(self, options: dict[str, object], place: Path, **trigger: object) -> None:
        """Start a query that writes files to `place`, where its checkpoint is, too."""
        told = self.ask(
            stream={name: str(value) for name, value in options.items()},
            path=str(place / "rows"),
            checkpoint=str(place / "checkpoint"),
            trigger=trigger,
        )
        assert "ok" in told, told["error"]

    def finish(self, within_s: float | None = None) -> None:
        """Let the query read all that there is, and end; or wait until it ends by itself."""
        told = self.ask(finish="all" if within_s is None else within_s)
        assert "ok" in told, told["error"]

    def written(self, place: Path) -> list[Row]:
        """The rows that queries have written to `place`."""
        told = self.ask(written=str(place / "rows"))
        assert "ok" in told, told["error"]
        return sorted(told["ok"], key=lambda row: (row["topic"], row["partition"], row["offset"]))

    def kill(self) -> None:
        """End driver, JVM and Python workers at once, as by a power cut."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._close_files()

    def __enter__(self) -> Spark:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _close_files(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        for each in (self._process.stdin, self._process.stdout, self._log):
            each.close()

    def close(self) -> None:
        """End it, if it was not killed."""
        if self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self._close_files()


class World:
    """A cluster, and what was written to it."""

    def __init__(self, up: UpCluster | HotCluster) -> None:
        self.bootstrap = up.bootstrap
        self.cli = Cli(up.bootstrap)
        self.connection = ClusterConnection(up.bootstrap)
        self.token = self.cli("cluster", "read-token").text.strip()
        self._bucket = up.data_dir / "bucket"

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
            self.connection.at(node["admin_url"], node["id"]).post("/upload")

    def objects(self, topic: str) -> set[int]:
        """Ids of the objects that hold a topic's records."""
        return {each[0] for each in self._found(topic)["slices"]}

    def _found(self, topic: str) -> dict[str, Any]:
        question = {"ranges": [{"topic": topic, "partition": 0}]}
        (row,) = self.connection.post("/slices?shared=true", question)["ranges"]
        return dict(row)

    def end_leases(self) -> None:
        """End the leases of Spark's reads, as if they had not been renewed."""
        for lease in self.cli("lease", "list", "--format", "json").json():
            assert lease["holder"].startswith("spark")
            self.cli("lease", "end", lease["id"])

    def wait_deleted(self, objects: set[int]) -> None:
        """Wait until objects are not in the bucket any more, which is an embedded one."""
        assert self._bucket.is_dir()
        until(lambda: not objects & self.bucket_ids())

    def bucket_ids(self) -> set[int]:
        """Ids of everything under the keys of objects."""
        return {int(path.name, 16) for path in bucket_files(self._bucket) if path.parts[-3] == "objects"}

    def move(self, partition: str) -> None:
        """Move a partition, TOPIC:INDEX, to another broker."""
        topic, _, index = partition.partition(":")
        rows = self.cli("partition", "list", topic, "--format", "json").json()
        (leader,) = [row["leader"] for row in rows if row["partition"] == int(index)]
        others = [each["id"] for each in self.connection.get("/brokers")["brokers"] if each["id"] != leader]
        self.cli("partition", "move", partition, "--to", others[0])

    def compact(self) -> None:
        for node in self.connection.get("/brokers")["brokers"]:
            at = self.connection.at(node["admin_url"], node["id"])
            while [each for each in at.post_lines("/compaction?eager=true") if each["event"] == "task"]:
                pass

    def delete_records(self, topic: str, offset: int, *, trims: bool = True) -> None:
        """Delete the records of partition 0 before an offset; `trims`: and wait until the metadata say so."""
        place = TopicPartition(topic, 0, offset)
        self.connection.admin.delete_records([place])[place].result(60)
        if not trims:
            return

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


def rows_of_batch(batch: Any) -> list[Row]:
    """An Arrow batch as rows in the form of `expected`."""
    rows: list[Row] = batch.to_pylist()
    for row in rows:
        row["timestamp"] = round(row["timestamp"].timestamp() * 1_000)
        for name in ("key", "value"):
            row[name] = None if row[name] is None else row[name].hex()
    return rows
