"""The whole pipeline of Spark over N GB: every job, while partitions move, a broker dies and objects are compacted.

A cluster of three brokers with its bucket in MinIO. Topics of small, middle and large records, with every compression,
nulls and headers, are loaded by producers in processes of their own. Then, one after the other:

- `compact`: all objects;
- `replay` of a topic into a topic, and of one into Parquet files;
- `load` of these files into a topic;
- `table`: an Iceberg table of a topic;
- `backfill` of a topic of another, small cluster, with its offsets;
- `stream`: a query with `format("tidelog")` that writes all topics to Parquet files;
- `audit` of every object that there is then.

After each step what it wrote is read, by consumers or from the files, and its digests (`tests.support.digests`) are
compared with those of the producers: every record at its offset, with its content, once. Then it is deleted. Jobs are
the command `tidelog spark …`; one that ends because brokers do not answer is run again, but for `load`.

MB/s are the bytes of keys and values that a step reads by its whole time, with Spark's start; `cpu s` is the CPU time
of a job's driver, JVM and Python workers, without brokers and MinIO. `disk` is what all files of the run have after a
step, MinIO's among them. About twice `--gb` is needed, four times as much must be free at the start; it is deleted at
the end. `make spark-pipeline`:

    python -m tests.harness.spark_pipeline --gb 10 [--store minio|localstack|moto] [--seed N] [--every-s 20]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, Spark, World
from tests.support.cluster_process import up_cluster
from tests.support.digests import Digest
from tests.support.hot_cluster import BROKERS, HotCluster, hot_cluster
from tests.support.job_process import JobProcess
from tests.support.lake import Warehouse
from tests.support.mixed_load import MixedTopic, consume, produce
from tests.support.s3_servers import KINDS, S3Server, ServerPool, section
from tidelog.runtime.errors import Unavailable

GB = 1e9
DISK_FACTOR = 4.0
"""Bytes on the disk for a byte of records, at most: docs/reliability.md has what runs needed."""
SPARE_BYTES = 2e9


@dataclass(frozen=True)
class TopicKind:
    """What a topic has."""

    name: str
    value_bytes: int
    compression: str
    part: float
    """Of all bytes."""

    def topic(self, options: PipelineOptions) -> MixedTopic:
        """The topic of a run."""
        size = options.gb * GB * self.part
        return MixedTopic.of_bytes(self.name, self.value_bytes, self.compression, PARTITIONS, size, options.seed)


KINDS_OF_TOPICS = (
    TopicKind("small", 100, "lz4", 0.08),
    TopicKind("middle-zstd", 1_000, "zstd", 0.22),
    TopicKind("middle-gzip", 1_000, "gzip", 0.10),
    TopicKind("middle-snappy", 1_000, "snappy", 0.20),
    TopicKind("large", 10_000, "none", 0.35),
)
HISTORY = TopicKind("history", 1_000, "lz4", 0.05)
"""The backfilled topic."""
PARTITIONS = 4
OBJECT_BYTES, OBJECTS = 16 << 20, 200
"""Objects are uploaded with so many bytes, less if there would be fewer, and have the records of
many partitions: so there is something to compact."""
JOB_S = 1_800.0
TRIES = 3
HEADER = "step              seconds    MB/s       records   cpu s  tries     disk  load"


@dataclass
class Step:
    """What a step took."""

    name: str
    seconds: float
    digest: Digest
    disk_bytes: int
    tries: int = 1
    cpu_s: float | None = None
    """Of a job's driver, JVM and Python workers in all tries; None where they are not its own."""

    def line(self) -> str:
        """For the table."""
        cpu = "" if self.cpu_s is None else f"{self.cpu_s:.1f}"
        speed = self.digest.size / 1e6 / self.seconds
        return (
            f"{self.name:16} {self.seconds:8.1f} {speed:7.1f} {self.digest.records:13,} {cpu:>7} {self.tries:6} "
            f"{self.disk_bytes / GB:5.2f} GB {os.getloadavg()[0]:5.1f}"
        )


@dataclass(frozen=True)
class PipelineOptions:
    """What to run."""

    gb: float
    seed: int = 1
    every_s: float = 20.0
    """Pause between two disturbances."""
    replicas: int = 1


class Disturber:
    """Moves partitions, kills a broker and starts it again, and has objects compacted, in a thread."""

    def __init__(self, hot: HotCluster, world: World, options: PipelineOptions) -> None:
        self._hot = hot
        self._world = world
        self._rng = random.Random(options.seed)
        self._every_s = options.every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done = {"moves": 0, "kills": 0, "compactions": 0}
        self.refused = 0
        self.problems: list[str] = []

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        self._thread.join(JOB_S)

    def _run(self) -> None:
        kinds = {"moves": self._move, "kills": self._kill, "compactions": self._compact}
        while True:
            for name in self._rng.sample(sorted(kinds), len(kinds)):
                if self._stopping.wait(self._every_s):
                    return
                try:
                    kinds[name]()
                    self.done[name] += 1
                except Unavailable:  # a broker compacts by itself just now; what is never done is a problem at the end
                    self.refused += 1
                except BaseException as error:  # noqa: BLE001  # `pytest.fail` of the helpers is one, too
                    self.problems.append(f"{name}: {type(error).__name__}: {error}")

    def _move(self) -> None:
        name = self._rng.choice(KINDS_OF_TOPICS).name
        self._world.move(f"{name}:{self._rng.randrange(PARTITIONS)}")

    def _kill(self) -> None:
        broker = self._rng.choice(BROKERS)
        self._hot.kill(broker)
        self._stopping.wait(self._rng.uniform(0, 3))
        self._hot.begin(broker)
        self._hot.ready(broker)

    def _compact(self) -> None:
        self._world.upload()
        self._world.compact()


@dataclass
class Pipeline:
    """The run."""

    options: PipelineOptions
    hot: HotCluster
    server: S3Server
    directory: Path
    spark: Spark
    sent: dict[str, list[Digest]] = field(default_factory=dict)
    """By topic and partition."""
    steps: list[Step] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = World(self.hot)

    # --- steps ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self, name: str, topics: Sequence[str]) -> Iterator[list[JobProcess]]:
        """Measure a step that reads these topics; what it gives gets the processes of its tries."""
        began_s = time.monotonic()
        tries: list[JobProcess] = []
        yield tries
        self._note(name, began_s, topics, tries)

    def _note(self, name: str, began_s: float, topics: Iterable[str], tries: Sequence[JobProcess] = ()) -> None:
        seconds = time.monotonic() - began_s
        whole = Digest.sum(each for topic in topics for each in self.sent[topic])
        used = sum(each.stat().st_blocks * 512 for each in _files(self.directory))
        cpu_s = sum(each.cpu_s for each in tries) if tries else None
        self.steps.append(Step(name, seconds, whole, used, max(len(tries), 1), cpu_s))
        print(self.steps[-1].line(), flush=True)

    def job(self, name: str, topics: Sequence[str], *arguments: str, tries: int = TRIES) -> dict[str, Any]:
        """Run a job, again when brokers do not answer; return what it says. Raises `AssertionError`."""
        given = ["--format", "json", "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
        given += ["--conf", f"spark.local.dir={self.directory / 'local'}"]
        with self._step(name, topics) as done:
            while True:
                log = self.directory / f"{name}-{len(done)}.log"
                process = JobProcess(
                    self.hot.bootstrap, log, "spark", *arguments, *given, more=self.server.environment()
                )
                done.append(process)
                try:
                    code = process.wait(JOB_S)
                finally:
                    process.kill()
                if not code:
                    break
                is_tried_again = code == Unavailable.exit_code and len(done) < tries
                assert is_tried_again, f"{name} ended with {code}:\n{process.said(40)}"
                print(f"{name} is run again:\n{process.said(3)}", flush=True)
        found = log.read_text()
        told: dict[str, Any] = json.loads(found[found.index("{\n") if "{\n" in found else found.index("{") :])
        return told

    def check(self, what: str, wanted: Sequence[Digest], found: Sequence[Digest], *only: str) -> None:
        """Note where digests differ, partition by partition."""
        if len(wanted) != len(found):
            self.problems.append(f"{what}: {len(found)} partitions in the place of {len(wanted)}")
        for at, (due, told) in enumerate(zip(wanted, found, strict=False)):
            if unlike := due.unlike(told, only=only):
                self.problems.append(f"{what}, partition {at}: {', '.join(unlike)} differ: {told} and not {due}")

    def check_files(self, what: str, topics: Sequence[str], paths: Sequence[str]) -> None:
        """Compare what Parquet files have with what was sent to topics."""
        call = {"call": "tests.pyspark_tidelog.digest_steps:of_files", "with": {"paths": list(paths)}}
        told = self.spark.ask(**call)
        assert "ok" in told, told["error"]
        found: dict[str, dict[int, Digest]] = {}
        for row in told["ok"]:
            topic, partition = row.pop("topic"), row.pop("partition")
            found.setdefault(topic, {})[partition] = Digest(**row)
        if sorted(found) != sorted(topics):
            self.problems.append(f"{what} has topics {sorted(found)}, and not {sorted(topics)}")
        for topic in topics:
            rows = found.get(topic, {})
            self.check(f"{what} of {topic}", self.sent[topic], [rows[at] for at in sorted(rows)])

    def delete_topic(self, topic: str) -> None:
        """Delete a topic, which gives its bytes back."""
        self.world.connection.admin.delete_topics([topic])[topic].result(60)

    # --- what is run ---------------------------------------------------------------------------------------------

    def load_topics(self) -> None:
        """Have the topics produced."""
        topics = [each.topic(self.options) for each in KINDS_OF_TOPICS]
        for topic in topics:
            create_topic(self.hot.bootstrap, topic.name, PARTITIONS)
        began_s = time.monotonic()
        self.sent = produce(self.hot.bootstrap, topics)
        self.world.upload()
        self._note("produce", began_s, self.sent)

    def compact(self) -> None:
        """Compact all objects."""
        told = self.job("compact", list(self.sent), "compact")
        print(f"{told['inputs']} objects were compacted into {told['outputs']}; {told['refused']} tasks were refused")
        if told["damaged"]:
            self.problems.append(f"compact met damaged objects: {told}")

    def replay_to_topic(self) -> None:
        """Replay a topic into another one."""
        topic = "middle-zstd"
        told = self.job("replay", [topic], "replay", topic, "--to", "replayed")
        self.check("replay", self.sent[topic], consume(self.hot.bootstrap, "replayed", PARTITIONS))
        if told["restamped"]:
            self.problems.append(f"replay has changed timestamps: {told}")
        self.delete_topic("replayed")

    def replay_to_files(self) -> None:
        """Replay a topic into Parquet files, and load these into another one."""
        topic, place = "middle-gzip", self.directory / "parquet"
        self.job("replay-parquet", [topic], "replay", topic, "--to-parquet", str(place))
        self.check_files("replay to Parquet", [topic], [str(place)])
        create_topic(self.hot.bootstrap, "loaded", PARTITIONS)
        columns = ("--value", "value", "--key", "key", "--timestamp", "timestamp")
        self.job("load", [topic], "load", "loaded", str(place), "--input", "parquet", *columns, tries=1)
        whole = Digest.sum(self.sent[topic])
        loaded = Digest.sum(consume(self.hot.bootstrap, "loaded", PARTITIONS))
        self.check("load", [whole], [loaded], "records", "size", "null_keys", "null_values", "pairs")
        self.delete_topic("loaded")
        shutil.rmtree(place)

    def table(self) -> None:
        """Make an Iceberg table of a topic."""
        topic, lake = "middle-snappy", Warehouse(self.directory / "lake")
        commit = str(sum(each.records for each in self.sent[topic]) // 4 + 1)
        where = ("--table", "lake.t", "--warehouse", str(lake.warehouse), "--max-offsets-per-commit", commit)
        self.job("table", [topic], "table", topic, *where)
        self.check_files("table", [topic], [task.file.file_path for task in lake.table("lake.t").scan().plan_files()])
        shutil.rmtree(lake.warehouse)

    def backfill(self) -> None:
        """Copy a topic of another cluster."""
        name = HISTORY.name
        with up_cluster(self.directory / "other", brokers=1, flags=FLAGS) as other:
            create_topic(other.bootstrap, name, PARTITIONS)
            self.sent |= produce(other.bootstrap, [HISTORY.topic(self.options)])
            self.job("backfill", [name], "backfill", name, "--from-bootstrap", other.bootstrap)
        self.check("backfill", self.sent[name], consume(self.hot.bootstrap, name, PARTITIONS))
        shutil.rmtree(self.directory / "other")

    def stream(self) -> None:
        """Stream all topics into files."""
        place, topics = self.directory / "stream", list(self.sent)
        trigger = sum(each.records for found in self.sent.values() for each in found) // 6 + 1
        keys = {"s3.access_key_id": self.server.access_key_id, "s3.secret_access_key": self.server.secret_access_key}
        options = self.world.options(
            subscribe=",".join(topics),
            startingOffsets="earliest",
            maxOffsetsPerTrigger=trigger,
            includeHeaders="true",
            **keys,
        )
        with self._step("stream", topics):
            self.spark.stream(options, place, availableNow=True)
            self.spark.finish(within_s=JOB_S)
        self.check_files("stream", topics, [str(place / "rows")])
        shutil.rmtree(place)

    def audit(self) -> None:
        """Check every object."""
        told = self.job("audit", list(self.sent), "audit")
        if told["findings"] or not told["objects"]:
            self.problems.append(f"audit: {told}")

    def run(self) -> None:
        """Do all steps; what is wrong is in `problems`."""
        self.load_topics()
        steps: Sequence[Callable[[], None]] = (
            self.compact,
            self.replay_to_topic,
            self.replay_to_files,
            self.table,
            self.backfill,
            self.stream,
            self.audit,
        )
        with Disturber(self.hot, self.world, self.options) as disturber:
            for step in steps:
                try:
                    step()
                except AssertionError as error:
                    self.problems.append(f"{step.__name__}: {error}")
        self.problems += disturber.problems
        self.problems += [f"there were no {name} meanwhile" for name, count in disturber.done.items() if not count]
        done = ", ".join(f"{count} {name}" for name, count in disturber.done.items())
        print(f"{done} meanwhile, {disturber.refused} refused")


def _files(directory: Path) -> Iterator[Path]:
    for each in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it is deleted just now
            if each.is_file() and not each.is_symlink():
                yield each


def sections(server: S3Server, options: PipelineOptions) -> dict[str, Mapping[str, Any]]:
    """The settings of the cluster's nodes."""
    size = max(4_096, min(OBJECT_BYTES, int(options.gb * GB / OBJECTS)))
    upload = {"age_ms": 2_000, "delete_delay_ms": 1_000, "size_bytes": size, "split_bytes": OBJECT_BYTES // 4}
    return {
        "s3": section(server),
        "replication": {"total_replicas": options.replicas},
        "upload": upload,
        "compaction": {"throttle_bytes_per_s": 1 << 30},
        "log": {"retention_ms": -1},
    }


def run(options: PipelineOptions, server: S3Server, directory: Path) -> Pipeline:
    """Run the pipeline in a directory; `problems` of the result are what was wrong."""
    print(HEADER, flush=True)
    with hot_cluster(directory / "cluster", sections(server, options)) as hot:
        memory = {"spark.driver.memory": "2g"}
        with Spark(directory / "spark", more=memory, answer_s=JOB_S) as spark:
            pipeline = Pipeline(options, hot, server, directory, spark)
            pipeline.run()
    return pipeline


def main() -> int:
    """Run; exit code 1 when something is wrong, 2 when the disk is too small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10.0, help="10^9 bytes of keys and values")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=KINDS, default="minio")
    parser.add_argument("--every-s", type=float, default=20.0, help="between two disturbances")
    parser.add_argument("--replicas", type=int, default=1, help="of each WAL")
    parser.add_argument("--dir", type=Path, help="where its files are meanwhile [default: the system's for such]")
    given = vars(parser.parse_args())
    store, place = given.pop("store"), given.pop("dir")
    options = PipelineOptions(**given)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # and end all processes
    with tempfile.TemporaryDirectory(prefix="tidelog-spark-pipeline-", dir=place) as name:
        directory = Path(name)
        needed, free = options.gb * GB * DISK_FACTOR + SPARE_BYTES, shutil.disk_usage(directory).free
        print(f"seed {options.seed}, {os.cpu_count()} cores, {free / GB:.1f} GB free, {needed / GB:.1f} GB needed")
        if free < needed:
            print(f"{directory.parent} is too small: see --dir, --gb", file=sys.stderr)
            return 2
        pool = ServerPool(directory, shared=False)
        try:
            pipeline = run(options, pool.get(store), directory)
        finally:
            pool.close()
    whole = sum(step.seconds for step in pipeline.steps)
    print(f"{whole:.0f} s, at most {max(step.disk_bytes for step in pipeline.steps) / GB:.2f} GB on the disk")
    print(json.dumps(pipeline.problems, indent=1) if pipeline.problems else "everything equals what was produced")
    return 1 if pipeline.problems else 0


if __name__ == "__main__":
    sys.exit(main())
