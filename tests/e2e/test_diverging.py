"""A branch and its topic as real clients see them, after both have gone on: writes, compaction, deletions, a kill."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.e2e.backends import QUIET, create_topic, s3_flags
from tests.support.cli import Cli, until
from tests.support.kafka_python import ClosingSelector
from tests.support.object_jobs import upload
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.cli.client import ClusterConnection

TOPIC, BRANCH = "orders", "orders-test"
PARTITIONS = 2
FLAGS = (
    *("--set", "upload.age_ms=300", "--set", "upload.delete_delay_ms=100", "--set", "clean.orphan_age_ms=0"),
    *("--set", "log.cleaner_interval_ms=300", "--set", "log.retention_check_interval_ms=500"),
)
Log = dict[int, bytes]
"""Value by offset."""


class Sides:
    """What was produced to both, by partition."""

    def __init__(self, process: TidelogProcess, seed: int = 1) -> None:
        self.process = process
        self._rng = random.Random(seed)
        self.logs: dict[str, list[Log]] = {TOPIC: [{} for _ in range(PARTITIONS)]}
        self.starts: dict[str, list[int]] = {TOPIC: [0] * PARTITIONS}
        self.cuts: list[int] = []

    def write(self, topic: str, records: int) -> None:
        producer = Producer({"bootstrap.servers": self.process.bootstrap, "enable.idempotence": True, **QUIET})

        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            self.logs[topic][message.partition()][message.offset()] = message.value()

        for number in range(records):
            value = b"%s %d %s" % (topic.encode(), number, self._rng.randbytes(self._rng.choice((10, 400))))
            key = b"key-%d" % self._rng.randrange(50)
            producer.produce(topic, value, key, partition=number % PARTITIONS, on_delivery=delivered)
            producer.poll(0)
        assert producer.flush(60) == 0

    def branched(self) -> None:
        self.logs[BRANCH] = [dict(log) for log in self.logs[TOPIC]]
        self.starts[BRANCH] = list(self.starts[TOPIC])
        self.cuts = [max(log) + 1 for log in self.logs[TOPIC]]

    def delete_records(self, topic: str, share: float) -> None:
        """Delete a share of what both had when the branch was made."""
        wanted = []
        for partition, cut in enumerate(self.cuts):
            self.starts[topic][partition] = max(self.starts[topic][partition], int(cut * share))
            wanted.append(TopicPartition(topic, partition, self.starts[topic][partition]))
        admin = AdminClient({"bootstrap.servers": self.process.bootstrap, **QUIET})
        for future in admin.delete_records(wanted, request_timeout=60).values():
            future.result(60)

    def check(self, topic: str) -> None:
        """Both clients read exactly what there is to read."""
        for partition, log in enumerate(self.logs[topic]):
            expected = {offset: value for offset, value in log.items() if offset >= self.starts[topic][partition]}
            for read in (read_confluent, read_kafka_python):
                assert read(self.process.bootstrap, topic, partition) == expected, (topic, partition, read.__name__)


def read_confluent(bootstrap: str, topic: str, partition: int) -> Log:
    """All of a partition, by librdkafka."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "r", "enable.auto.commit": False, "check.crcs": True, **QUIET}
    )
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), 60)
        consumer.assign([TopicPartition(topic, partition, low)])
        found: Log = {}
        while consumer.position([TopicPartition(topic, partition)])[0].offset < high and len(found) < high - low:
            message = consumer.poll(60)
            assert message is not None, f"{topic}-{partition}: nothing comes after {max(found, default=low)}"
            assert message.error() is None, message.error()
            offset, value = message.offset(), message.value()
            assert offset is not None and isinstance(value, bytes)
            found[offset] = value
        return found
    finally:
        consumer.close()


def read_kafka_python(bootstrap: str, topic: str, partition: int) -> Log:
    """All of a partition, by kafka-python."""
    import kafka

    consumer = kafka.KafkaConsumer(
        bootstrap_servers=bootstrap, enable_auto_commit=False, selector=ClosingSelector, consumer_timeout_ms=60_000
    )
    try:
        place = kafka.TopicPartition(topic, partition)
        consumer.assign([place])
        low, high = consumer.beginning_offsets([place])[place], consumer.end_offsets([place])[place]
        consumer.seek(place, low)
        found: Log = {}
        for record in consumer if high > low else ():
            found[record.offset] = record.value
            if record.offset + 1 >= high:
                break
        return found
    finally:
        consumer.close()


def check_shown(cluster: ClusterConnection, sides: Sides) -> None:
    """Operators see in which objects a branch's records are, those that it shares and its own."""
    for partition, start in enumerate(sides.starts[BRANCH]):
        shown = cluster.get(f"/partition?topic={BRANCH}&partition={partition}")["bucket"]
        ranges = [(each["start_offset"], each["end_offset"]) for each in shown["objects"]]
        assert ranges[0][0] <= start and ranges[-1][1] == shown["committed_end"]
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        held = cluster.get(f"/explain?topic={BRANCH}&partition={partition}&offset={start}")["object"]
        assert held["block"]["start_offset"] <= start < held["block"]["end_offset"]


def diverge(process: TidelogProcess, restart: Callable[[], None], rounds: int, records: int) -> None:
    """Make a branch, let both sides go on, and check both; then the branch alone."""
    cli, sides = Cli(process.bootstrap), Sides(process)
    create_topic(process.bootstrap, TOPIC, PARTITIONS, **{"segment.bytes": "20000"})
    sides.write(TOPIC, records)
    upload(process.bootstrap)
    sides.write(TOPIC, records // 4)
    cli("snapshot", "create", "before", "--topics", TOPIC)
    sides.branched()
    told = cli("topic", "branch", f"{TOPIC}@before", BRANCH, "-c", "retention.ms=-1", "--format", "json").json()
    assert (told["topic"], told["source"], told["configs"]["retention.ms"]) == (BRANCH, f"{TOPIC}@before", "-1")
    assert f"created again of {TOPIC}@before" in cli("topic", "branch", f"{TOPIC}@before", "again").text
    for number in range(rounds):
        sides.write(TOPIC, records // 2)
        sides.write(BRANCH, records // 3)
        sides.delete_records((TOPIC, BRANCH)[number % 2], 0.2 + 0.5 * number / rounds)
        cli("object", "compact", "--eager")
        if number == rounds // 2:
            cli("snapshot", "delete", "before", "--yes")
            restart()
        sides.check(TOPIC)
        sides.check(BRANCH)
    check_shown(ClusterConnection(process.bootstrap), sides)
    rows = {row["topic"]: row for row in cli("topic", "branches", "--format", "json").json()}
    left = sum(cut - start for cut, start in zip(sides.cuts, sides.starts[BRANCH], strict=True))
    assert rows.keys() == {BRANCH, "again"} and rows[BRANCH]["shared"] == left > 0 < rows[BRANCH]["own"]
    cli("topic", "delete", TOPIC, "again", "--yes")
    until(lambda: cli("topic", "branches", "--format", "json").json()[0]["only_bytes"] > 0)
    sides.write(BRANCH, records // 3)
    sides.check(BRANCH)
    assert BRANCH in cli("topic", "branches").text
    assert "is expected, not 'orders'" in cli("topic", "branch", "orders", "x", code=2).err
    assert "there is no snapshot 'before'" in cli("topic", "branch", f"{TOPIC}@before", "x", code=3).err


def test_both_sides_have_what_was_sent_to_them_after_they_have_diverged(tmp_path: Path) -> None:
    with running(tmp_path / "data", FLAGS) as process:

        def restart() -> None:
            process.kill_broker()
            process.wait_for_line("ready again")

        diverge(process, restart, rounds=2, records=300)


@pytest.mark.long
@pytest.mark.parametrize("wal", ["disk", "s3"])
def test_they_do_on_an_s3_server_for_longer(tmp_path: Path, minio_server: S3Server, wal: str) -> None:
    with running(tmp_path / "data", [*FLAGS, *s3_flags(minio_server), "--wal", wal]) as process:

        def restart() -> None:
            process.kill_broker()
            process.wait_for_line("ready again")

        diverge(process, restart, rounds=12, records=2_000)
