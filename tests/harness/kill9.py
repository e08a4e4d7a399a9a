"""`kill -9` of a broker under load, again and again; then every promise is checked against what clients were told.

Load: an idempotent and a plain producer (both acks=all) write numbered records to every partition, and a group commits
offsets. Each round lets them run for a random time and kills the broker process; its supervisor starts it again. Small
upload thresholds keep uploads, commits and WAL trims in flight when the kill comes. At the end the whole log is read:

- every acknowledged record is at the offset that was acknowledged, byte for byte;
- no record of the idempotent producer is there twice, and its records are in order;
- the offsets of every partition are contiguous from 0;
- a committed group offset never went back, and the last acknowledged commit is still there.

    python -m tests.harness.kill9 --rounds 200 [--seed N] [--wal disk|s3] [--s3-endpoint URL --bucket NAME]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.tidelog_process import TidelogProcess

TOPIC = "kill9"
PARTITIONS = 6
VALUE_BYTES = 400
SMALL_UPLOADS = ("--set", "upload.age_ms=400", "--set", "upload.size_bytes=524288", "--set", "upload.split_bytes=65536")


@dataclass
class Acknowledged:
    """What a producer was told."""

    records: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(partition, offset) → value."""
    failed: int = 0


class Load(threading.Thread):
    """A producer that never stops writing numbered records until told to."""

    def __init__(self, label: str, bootstrap: str, idempotent: bool) -> None:
        super().__init__(daemon=True)
        self.label = label
        self.acknowledged = Acknowledged()
        self.next_number = [0] * PARTITIONS
        self._stopping = threading.Event()
        settings: dict[str, str | int | bool] = {
            "bootstrap.servers": bootstrap,
            "log_level": 0,  # it would report every refused connection of every kill
            "acks": "all",
            "linger.ms": 2,
            "retry.backoff.ms": 20,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "message.timeout.ms": 300_000,
            "enable.idempotence": idempotent,
        }
        if not idempotent:
            settings |= {"message.timeout.ms": 5_000, "retries": 0}
        self._producer = Producer(settings)

    def _delivered(self, error: object, message: Message) -> None:
        if error is not None:
            self.acknowledged.failed += 1
            return
        where = (message.partition(), message.offset())
        previous = self.acknowledged.records.get(where)
        value = message.value()
        assert previous in (None, value), f"{self.label}: two records were acknowledged at {where}"
        self.acknowledged.records[where] = value

    def run(self) -> None:
        while not self._stopping.is_set():
            for partition in range(PARTITIONS):
                number = self.next_number[partition]
                value = f"{self.label} {partition} {number} ".encode().ljust(VALUE_BYTES, b".")
                try:
                    self._producer.produce(TOPIC, value, partition=partition, on_delivery=self._delivered)
                except BufferError:
                    self._producer.poll(0.05)
                    continue
                self.next_number[partition] += 1
            self._producer.poll(0.01)

    def finish(self) -> None:
        """Stop writing and wait until every record has an outcome."""
        self._stopping.set()
        self.join()
        assert self._producer.flush(120) == 0, f"{self.label}: records without an outcome"


class Committer(threading.Thread):
    """Commits growing offsets for a group; remembers the last acknowledged one."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged = -1
        self._stopping = threading.Event()
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "kill9-group", "log_level": 0})

    def run(self) -> None:
        offset = 0
        while not self._stopping.is_set():
            try:
                done = self._consumer.commit(offsets=[TopicPartition(TOPIC, 0, offset)], asynchronous=False)
            except KafkaException:
                self._stopping.wait(0.05)
                continue
            if done[0].error is None:
                self.acknowledged = offset
                offset += 1
            self._stopping.wait(0.01)

    def finish(self) -> int:
        """Stop, and return the committed offset that the cluster has now."""
        self._stopping.set()
        self.join()
        committed = self._consumer.committed([TopicPartition(TOPIC, 0)], timeout=60)[0].offset
        self._consumer.close()
        return int(committed)


@dataclass
class Report:
    """What a run found."""

    rounds: int
    acknowledged: dict[str, int]
    failed: dict[str, int]
    read: int
    lost: list[str]
    doubled: list[str]
    gaps: list[str]
    commits: list[str]
    downtime_s: list[float]

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.gaps or self.commits)

    def text(self) -> str:
        down = sorted(self.downtime_s)
        lines = [
            f"rounds of kill -9                 {self.rounds}",
            *(f"acknowledged, {label:<18}  {count}" for label, count in self.acknowledged.items()),
            *(f"failed (told so), {label:<14}  {count}" for label, count in self.failed.items()),
            f"records read back                 {self.read}",
            f"acknowledged and lost             {len(self.lost)}",
            f"idempotent and doubled            {len(self.doubled)}",
            f"gaps in offsets                   {len(self.gaps)}",
            f"group commits lost                {len(self.commits)}",
        ]
        if down:
            worst = down[-1]
            lines.append(
                f"kill to ready, s                  median {statistics.median(down):.2f}, "
                f"p90 {down[int(len(down) * 0.9)]:.2f}, max {worst:.2f}"
            )
        for name in ("lost", "doubled", "gaps", "commits"):
            lines += [f"  {name}: {finding}" for finding in getattr(self, name)[:5]]
        return "\n".join(lines)


def read_all(bootstrap: str) -> dict[int, list[tuple[int, bytes]]]:
    """Every record of every partition, from the beginning to the high watermark."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "kill9-reader", "enable.auto.commit": False, "check.crcs": True}
    )
    found: dict[int, list[tuple[int, bytes]]] = {}
    try:
        for partition in range(PARTITIONS):
            _, end = consumer.get_watermark_offsets(TopicPartition(TOPIC, partition), timeout=60)
            records: list[tuple[int, bytes]] = []
            found[partition] = records
            consumer.assign([TopicPartition(TOPIC, partition, OFFSET_BEGINNING)])
            deadline = time.monotonic() + 120
            while (records[-1][0] + 1 if records else 0) < end:
                assert time.monotonic() < deadline, f"partition {partition} is not readable up to {end}"
                for message in consumer.consume(5000, 1.0):
                    assert message.error() is None, message.error()
                    records.append((message.offset(), message.value()))
    finally:
        consumer.close()
    return found


def check(found: dict[int, list[tuple[int, bytes]]], loads: list[Load], report: Report) -> None:
    """Hold what was read against what was acknowledged."""
    for partition, records in found.items():
        for expected, (offset, _) in enumerate(records):
            if offset != expected:
                report.gaps.append(f"partition {partition}: offset {offset} where {expected} was due")
                break
        report.read += len(records)
    by_place = {(partition, offset): value for partition, records in found.items() for offset, value in records}
    for load in loads:
        report.acknowledged[load.label] = len(load.acknowledged.records)
        report.failed[load.label] = load.acknowledged.failed
        for place, value in load.acknowledged.records.items():
            if by_place.get(place) != value:
                report.lost.append(f"{load.label}: partition {place[0]} offset {place[1]} holds something else")
    for partition, records in found.items():
        mine = [value for _, value in records if value.startswith(b"idempotent ")]
        twice = [value for value, count in Counter(mine).items() if count > 1]
        report.doubled += [f"partition {partition}: {value[:40]!r}" for value in twice]
        numbers = [int(value.split()[2]) for value in mine]
        if numbers != sorted(numbers):
            report.doubled.append(f"partition {partition}: idempotent records out of order")


def run(rounds: int, seed: int, data_dir: Path, flags: tuple[str, ...] = ()) -> Report:
    """The whole exercise; raises only when the cluster does not come back."""
    rng = random.Random(seed)
    report = Report(rounds, {}, {}, 0, [], [], [], [], [])
    process = TidelogProcess(data_dir, [*SMALL_UPLOADS, *flags])
    try:
        process.start()
        admin = AdminClient({"bootstrap.servers": process.bootstrap, "log_level": 0})
        admin.create_topics([NewTopic(TOPIC, num_partitions=PARTITIONS)])[TOPIC].result(60)
        loads = [Load("idempotent", process.bootstrap, True), Load("plain", process.bootstrap, False)]
        committer = Committer(process.bootstrap)
        for worker in (*loads, committer):
            worker.start()
        for number in range(rounds):
            time.sleep(rng.uniform(0.05, 1.5))  # the random moment of the kill, not a wait for anything
            killed = time.monotonic()
            process.kill_broker()
            process.wait_for_line("ready again", 120)
            report.downtime_s.append(time.monotonic() - killed)
            if sys.stdout.isatty() or (number + 1) % 20 == 0:
                print(f"round {number + 1}: ready after {report.downtime_s[-1]:.2f} s", flush=True)
        for load in loads:
            load.finish()
        last_acknowledged = committer.acknowledged
        committed = committer.finish()
        if committed < max(last_acknowledged, committer.acknowledged):
            report.commits.append(f"committed offset is {committed}, {committer.acknowledged} was acknowledged")
        check(read_all(process.bootstrap), loads, report)
        code = process.stop()
        assert code == 0, process.tail()
    finally:
        process.kill()
    return report


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--wal", choices=("disk", "s3"), default="disk")
    arguments.add_argument("--s3-endpoint")
    arguments.add_argument("--bucket")
    given = arguments.parse_args()
    flags: tuple[str, ...] = ("--wal", given.wal)
    if given.s3_endpoint:
        flags += ("--s3-endpoint", given.s3_endpoint, "--bucket", given.bucket)
    with tempfile.TemporaryDirectory(prefix="tidelog-kill9-") as scratch:
        report = run(given.rounds, given.seed, Path(scratch) / "data", flags)
    print(report.text())
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
