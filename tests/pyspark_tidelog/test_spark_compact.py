"""`tidelog spark compact` over a real cluster: nothing is lost or doubled, whatever goes on and whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.e2e.backends import QUIET, create_topic
from tests.pyspark_tidelog.harness import FLAGS, ROOT, Spark, World, expected
from tests.support.cli import environment, until
from tests.support.cluster_process import up_cluster
from tests.support.load import Load

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]

STATIC = {"small": 3, "wide": 8}
"""Topics that are written before, by their partitions."""
UPLOADS = 16
RECORDS = 25
LAYOUT = ("--set", "compaction.target_bytes=65536", "--set", "compaction.stream_bytes=32768")


class Job:
    """`tidelog spark compact` in a process group of its own."""

    def __init__(self, bootstrap: str, directory: Path, *flags: str) -> None:
        directory.mkdir()
        self._err = directory / "err"
        self._out = directory / "out"
        conf = [f"spark.local.dir={directory}", "spark.ui.enabled=false", "spark.driver.bindAddress=127.0.0.1"]
        conf.append("spark.log.level=ERROR")  # tells of lost tasks
        arguments = ["--master", "local[2,4]", "--format", "json", *(f"--conf={each}" for each in conf), *flags]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidelog", "spark", "compact", *arguments],
                env={**environment(bootstrap), "SPARK_LOCAL_IP": "127.0.0.1"},
                cwd=ROOT,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, code: int = 0) -> Any:
        assert self.process.wait(240) == code, self.log[-3_000:]
        return json.loads(self._out.read_text())

    def workers(self) -> list[int]:
        """The Python workers of this job's executors: children of the daemon that Spark has fork them."""
        parents: dict[int, int] = {}
        daemons: set[int] = set()
        for path in Path("/proc").iterdir():
            if not path.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if b"pyspark.daemon" in (path / "cmdline").read_bytes():
                    daemons.add(int(path.name))

        def is_ours(pid: int) -> bool:
            while pid not in (0, 1, self.process.pid):
                pid = parents.get(pid, 0)
            return pid == self.process.pid

        return [pid for pid in sorted(daemons) if parents.get(pid) in daemons and is_ours(pid)]

    @property
    def has_lost_a_task(self) -> bool:
        return "Exception in task" in self.log

    def lose_workers(self) -> None:
        """Kill the workers within tasks: those that they have, or get while they are stopped."""
        until(lambda: bool(self.workers()) or self.process.poll() is not None)
        workers = self.workers()
        self._signal(workers, signal.SIGSTOP)
        self._unless_ended(lambda: False, 3)
        self._signal(workers, signal.SIGKILL)
        self._unless_ended(lambda: self.has_lost_a_task, 10)

    def _unless_ended(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def _signal(self, workers: Sequence[int], number: signal.Signals) -> None:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End the driver, its JVM and its workers, as a machine that loses power."""
        workers = self.workers()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._signal(workers, signal.SIGKILL)
        self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    found: list[Job] = []
    yield found
    for job in found:
        job.close()


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    found = Spark(tmp_path_factory.mktemp("spark"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=[*FLAGS, *LAYOUT]) as up:
        found = World(up)
        for topic, partitions in STATIC.items():
            create_topic(up.bootstrap, topic, partitions)
        yield found


class Static:
    """The topics that are written before a job begins."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.records = 0
        """Of each partition."""

    def fill(self) -> None:
        """Write further records, in small objects."""
        for _ in range(UPLOADS):
            for topic, partitions in STATIC.items():
                for partition in range(partitions):
                    self._world.produce(topic, partition, self.records, RECORDS)
            self._world.upload()
            self.records += RECORDS


@pytest.fixture(scope="module")
def static(world: World) -> Static:
    return Static(world)


def committed(world: World) -> set[int]:
    rows = world.cli("object", "list", "--limit", 1_000, "--format", "json").json()
    return {row["id"] for row in rows if row["state"] == "committed"}


def check(world: World, spark: Spark, count: int) -> None:
    """The static topics have what was written to them, by Kafka's protocol and from the objects."""
    for topic, partitions in STATIC.items():
        rows = [row for partition in range(partitions) for row in expected(topic, partition, 0, count)]
        assert spark.read(world.options(subscribe=topic, includeHeaders="true")) == rows
        found = by_kafka(world.bootstrap, topic, partitions)
        assert found == [(row["partition"], row["offset"], row["key"], row["value"]) for row in rows]


def by_kafka(bootstrap: str, topic: str, partitions: int) -> list[tuple[int, int, str | None, str | None]]:
    """Partition, offset, key and value (in hex) of everything in a topic."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "enable.auto.commit": False, **QUIET})
    found: list[tuple[int, int, str | None, str | None]] = []
    try:
        places = [TopicPartition(topic, index, 0) for index in range(partitions)]
        count = sum(consumer.get_watermark_offsets(each, timeout=60)[1] for each in places)
        consumer.assign(places)

        def all_came() -> bool:
            for message in consumer.consume(5_000, 0.2):
                assert message.error() is None, message.error()
                partition, offset, key, value = message.partition(), message.offset(), message.key(), message.value()
                assert partition is not None and offset is not None
                found.append((partition, offset, _hex(key), _hex(value)))
            return len(found) >= count

        until(all_came)
    finally:
        consumer.close()
    return sorted(found, key=lambda row: row[:2])


def _hex(data: bytes | str | None) -> str | None:
    assert not isinstance(data, str)
    return None if data is None else data.hex()


@pytest.mark.long
def test_a_dry_run_tells_what_would_be_rewritten_and_changes_nothing(world: World, static: Static) -> None:
    static.fill()
    before = committed(world)
    plan = world.cli("spark", "compact", "--dry-run", "--format", "json").json()
    assert plan["problems"] == [] and plan["tasks"] == sum(plan["kinds"].values()) > 0
    assert UPLOADS <= plan["objects"] <= len(before)
    assert 0 < plan["estimated_bytes"] <= plan["bytes"] and plan["requests"] >= plan["objects"]
    text = world.cli("spark", "compact", "--dry-run", "--topic", "small").text
    assert "Nothing was changed" in text and "objects" in text
    assert "'nothing'" in world.cli("spark", "compact", "--dry-run", "--topic", "nothing", code=3).err
    assert committed(world) == before


@pytest.mark.long
@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.long)])
def test_small_objects_become_large_ones_under_producers_moves_and_a_killed_worker(
    world: World, static: Static, spark: Spark, jobs: list[Job], tmp_path: Path, kills: bool
) -> None:
    static.fill()
    busy = f"busy-{kills}".lower()
    create_topic(world.bootstrap, busy, 2)
    before = committed(world)
    stop = threading.Event()

    def move_and_upload() -> None:
        """Move the partitions to and fro, and upload what is produced, until the job has ended."""
        target = 1
        while not stop.is_set():
            world.cli("partition", "move", f"{busy}:0", "small:0", "wide:3", "--to", target)
            world.upload()
            target = 3 - target

    mover = threading.Thread(target=move_and_upload, daemon=True)
    with Load(world.bootstrap, busy, 2) as load:
        load.more()
        jobs.append(job := Job(world.bootstrap, tmp_path / "job"))
        mover.start()
        try:
            for _ in range(3 if kills else 0):
                if job.has_lost_a_task:
                    break
                job.lose_workers()
            result = job.wait()
        finally:
            stop.set()
            mover.join(120)
    assert not mover.is_alive()
    assert job.has_lost_a_task == kills, job.log[-3_000:]
    assert result["tasks"] > 0 and result["damaged"] == result["failed"] == 0, result
    assert result["outputs"] < result["inputs"] and result["written_bytes"] > 0
    assert len(before & committed(world)) < len(before) / 4, "nearly all that was small is replaced"
    check(world, spark, static.records)
    load.check(world.bootstrap)
    assert world.cli("object", "verify", "--format", "json").code == 0


@pytest.mark.long
def test_a_job_that_is_killed_is_run_again_beside_the_brokers_own_compaction(
    world: World, static: Static, spark: Spark, jobs: list[Job], tmp_path: Path
) -> None:
    static.fill()
    files, small = world.bucket_ids(), committed(world)
    jobs.append(first := Job(world.bootstrap, tmp_path / "first"))
    until(lambda: bool(world.bucket_ids() - files))
    first.kill()
    check(world, spark, static.records)
    jobs.append(second := Job(world.bootstrap, tmp_path / "second"))
    until(lambda: bool(second.workers()))
    world.compact()
    result = second.wait()
    assert result["damaged"] == result["failed"] == 0, result
    assert len(small & committed(world)) < len(small) / 2
    check(world, spark, static.records)
    assert world.cli("object", "verify", "--format", "json").code == 0
    waiting = world.cli("object", "clean", "--dry-run", "--format", "json").json()
    assert waiting["orphans"] == [], "what the killed job left has ids that expire"
