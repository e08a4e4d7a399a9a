"""Log compaction of real brokers over a real S3 server: each key's last value, a smaller bucket, kills and moves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from tests.e2e.backends import QUIET, create_topic, s3_flags
from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tests.support.s3_servers import S3Server, new_bucket, section
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.broker.partitions.round_cleaning import WORTH_A_PROCESS_BYTES
from tidelog.broker.settings import LogSettings
from tidelog.chaos.serve_cluster import tidelog_json
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.open import open_store
from tidelog.storage.settings import S3Settings

TOPIC = "table"
KEYS = 40
CONFIG = {"cleanup.policy": "compact", "segment.bytes": "20000", "min.cleanable.dirty.ratio": "0.1"}
FLAGS = (
    *("--set", "upload.age_ms=200", "--set", "upload.delete_delay_ms=100", "--set", "log.cleaner_interval_ms=300"),
    *("--set", "clean.orphan_age_ms=0"),
)


class Table:
    """What was produced: each key's last value, None after a tombstone."""

    def __init__(self, bootstrap: Callable[[], str], seed: int) -> None:
        self._bootstrap = bootstrap
        self._rng = random.Random(seed)
        self.values: dict[bytes, bytes | None] = {}
        self.count = 0

    def write(self, records: int, value_bytes: int = 150, batch: int = 10) -> None:
        settings = {"bootstrap.servers": self._bootstrap(), "enable.idempotence": True, "batch.num.messages": batch}
        producer = Producer({**settings, **QUIET})
        for _ in range(records):
            key = b"key-%d" % self._rng.randrange(KEYS)
            value = None if self._rng.random() < 0.05 else b"%d:" % self.count + self._rng.randbytes(value_bytes)
            producer.produce(TOPIC, value, key, partition=0)
            self.values[key] = value
            self.count += 1
            if self.count % 100 == 0:
                producer.poll(0)
        assert producer.flush(60) == 0

    def transact(self, producer: Producer, records: int, *, commit: bool) -> None:
        """Write in one transaction; what is aborted never was."""
        before = dict(self.values)
        producer.begin_transaction()
        for _ in range(records):
            key = b"key-%d" % self._rng.randrange(KEYS)
            value = b"%d:" % self.count + self._rng.randbytes(150)
            producer.produce(TOPIC, value, key, partition=0)
            self.values[key] = value
            self.count += 1
        if commit:
            producer.commit_transaction(60)
        else:
            assert producer.flush(60) == 0
            producer.abort_transaction(60)
            self.values = before

    def read(self) -> list[tuple[int, bytes, bytes | None]]:
        """All of the partition, as a read_committed consumer from offset 0 sees it."""
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap(),
                "group.id": "reader",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "check.crcs": True,
                "isolation.level": "read_committed",
                **QUIET,
            }
        )
        found: list[tuple[int, bytes, bytes | None]] = []
        try:
            consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])
            while True:
                message = consumer.poll(60)
                assert message is not None, "the reader does not get on"
                error = message.error()
                if error is not None:
                    assert error.name() == "_PARTITION_EOF", error
                    return found
                offset, key = message.offset(), message.key()
                assert offset is not None and isinstance(key, bytes)
                value = message.value()
                assert value is None or isinstance(value, bytes)
                found.append((offset, key, value))
        finally:
            consumer.close()

    def check(self) -> int:
        """Check what is read; return the number of records."""
        found = self.read()
        offsets = [offset for offset, _, _ in found]
        assert offsets == sorted(set(offsets))
        assert {key: value for _, key, value in found} == self.values
        return len(found)

    def wait_cleaned(self, limit: int) -> None:
        wait_until(lambda: self.check() <= limit, f"at most {limit} of {self.count} records are left", 90)


def bucket_bytes(settings: S3Settings, tmp_path: Path) -> int:
    """Bytes of all objects in a bucket."""

    async def total() -> int:
        store = open_store(settings, tmp_path, SystemClock(), random.Random())
        try:
            return sum([one.size async for one in store.list("") if "/objects/" in one.key])
        finally:
            await store.close()

    return asyncio.run(total())


def test_each_keys_last_value_stays_and_the_bucket_shrinks(tmp_path: Path, minio_server: S3Server) -> None:
    bucket = new_bucket()
    settings = S3Settings(**{**section(minio_server), "bucket": bucket})
    with running(tmp_path / "data", (*FLAGS, *s3_flags(minio_server, bucket))) as process:
        create_topic(process.bootstrap, TOPIC, 1, **CONFIG)
        table = Table(lambda: process.bootstrap, 1)
        table.write(3_000)
        table.wait_cleaned(300)
        written = table.count * 150
        wait_until(lambda: bucket_bytes(settings, tmp_path) < written // 3, "the bucket shrinks", 60)
        table.write(500)
        table.wait_cleaned(300)
        assert process.stop() == 0
    with running(tmp_path / "data", (*FLAGS, *s3_flags(minio_server, bucket)), process.port):
        table.check()


@pytest.mark.gate_cases("0")
@pytest.mark.parametrize("seed", range(2))
def test_kill_9_in_the_middle_changes_nothing(tmp_path: Path, minio_server: S3Server, seed: int) -> None:
    rng = random.Random(seed)
    slow = ("--set", "log.cleaner_bytes_per_s=200000")
    with running(tmp_path / "data", (*FLAGS, *slow, *s3_flags(minio_server))) as process:
        create_topic(process.bootstrap, TOPIC, 1, **CONFIG)
        table = Table(lambda: process.bootstrap, seed)
        for _ in range(4):
            table.write(800)
            table.check()
            _let_it_work(process, rng.uniform(0.2, 1.5))
            process.kill_broker()
            process.wait_for_line("ready")
            table.check()
        table.wait_cleaned(300)


def _let_it_work(process: TidelogProcess, seconds: float) -> None:
    """Wait for the end of an upload or a round, at most so long: a kill may come at any step."""
    lines = len(process.output)
    try:
        wait_until(lambda: any("compacted" in each for each in process.output[lines:]), "a step", seconds)
    except AssertionError:
        return  # it is in the middle of something


def dirty_bytes(bootstrap: str) -> int:
    """What a round could cover now: sealed, uploaded, and before the checkpoint in the bucket."""
    (topic,) = tidelog_json(bootstrap, "topic", "describe", TOPIC)
    (row,) = topic["partitions"]
    return int(row.get("dirty_bytes", 0))


def workers(broker_pid: int) -> set[int]:
    """The processes in which a broker decides its rounds."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (place / "stat").read_text().rpartition(")")[2].split()
            if (
                status[0] != "Z"
                and int(status[1]) == broker_pid
                and b"cleaning_worker" in (place / "cmdline").read_bytes()
            ):
                found.add(int(place.name))
    return found


def test_a_round_whose_process_is_killed_or_whose_broker_stops_is_done_again(
    tmp_path: Path, minio_server: S3Server
) -> None:
    config = {**CONFIG, "segment.bytes": "1000000", "min.cleanable.dirty.ratio": "1.0"}
    flags = (*FLAGS, "--set", "log.cleaner_bytes_per_s=2000000", *s3_flags(minio_server))
    with running(tmp_path / "data", flags) as process:
        create_topic(process.bootstrap, TOPIC, 1, **config)
        table = Table(lambda: process.bootstrap, 7)
        table.write(6_000, value_bytes=1_100, batch=100)
        wait_until(lambda: dirty_bytes(process.bootstrap) >= WORTH_A_PROCESS_BYTES, "a large round could begin")
        admin = AdminClient({"bootstrap.servers": process.bootstrap, **QUIET})
        entry = ConfigEntry("min.cleanable.dirty.ratio", "0.1", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, TOPIC, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(30)
        broker_pid = process.broker_pid()
        wait_until(lambda: bool(workers(broker_pid)), "a round of a large log has a process", 60)
        killed = workers(broker_pid)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: bool(workers(broker_pid) - killed), "the round is done again", 60)
        assert process.stop() == 0
        assert not workers(broker_pid)
        assert any("the process of log compaction is lost" in line for line in process.output)
    with running(tmp_path / "data", flags, process.port):
        table.wait_cleaned(2_000)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, log=LogSettings(move_drain_timeout_ms=1_000, cleaner_interval_ms=200)) as cluster:
        create_topic(cluster.bootstrap, TOPIC, 1, **CONFIG)
        yield cluster


@pytest.mark.long
def test_a_partition_that_moves_is_compacted_by_whoever_leads_it(cluster: Cluster) -> None:
    table = Table(lambda: cluster.bootstrap, 5)
    for _ in range(6):
        table.write(600)
        cluster.move(TOPIC, 0, cluster.leader(TOPIC, 0) % 3 + 1)
        table.check()
    table.wait_cleaned(300)


@pytest.mark.long
def test_what_is_aborted_supersedes_nothing_and_what_is_committed_does(cluster: Cluster) -> None:
    table = Table(lambda: cluster.bootstrap, 6)
    settings = {"bootstrap.servers": cluster.bootstrap, "transactional.id": "keeper", "batch.num.messages": 10}
    producer = Producer({**settings, **QUIET})
    producer.init_transactions(60)
    for turn in range(12):
        table.transact(producer, 150, commit=turn % 3 != 2)
        if turn % 4 == 3:
            cluster.move(TOPIC, 0, cluster.leader(TOPIC, 0) % 3 + 1)
            table.check()
    table.write(200)
    table.wait_cleaned(300)
