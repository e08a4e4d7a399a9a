"""What a branch of a large topic takes, and whether both sides have what was produced to them after they have diverged.

    python -m bench.topic_branch [--gb 5] [--rounds 12] [--round-mb 64] [--partitions 4] [--record-bytes 4096]
                                 [--dir DIR] [--set section.key=value]

A real `tidelog up` with its embedded bucket. A topic is filled by librdkafka and uploaded. Then, each with its
milliseconds, and the requests and bytes that went to the bucket meanwhile (by the broker's accounts):

- `tidelog snapshot create` by the admin HTTP, with nothing and with `--round-mb` that are only in the WAL;
- `tidelog topic branch`, up to the answer, and up to the first record that was written to the branch and read again.

Then both go on, for `--rounds`: to each `--round-mb` are produced, objects are compacted, and from each DeleteRecords
takes a twentieth of what the topic had, from either in turn: with it retention moves the log start, as by time. In the
middle the broker is killed once, and the snapshot deleted; before the last check the topic is deleted, and the branch
read again. Every record says which topic, partition and number it is of, so each reader checks each byte of each
record between the log start and the end, and that none is missing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlencode

from bench._clients import create_topic, flush
from bench._common import broker, directory, in_process, quick, row
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import Unavailable

SOURCE, BRANCH, SNAPSHOT = "topic", "branch", "before"
NOISE_BYTES = 1 << 20
AT_A_TIME = 500
SETTINGS = (
    "log.retention_check_interval_ms=1000",
    "upload.delete_delay_ms=1000",
    "compaction.throttle_bytes_per_s=268435456",
)
LIBRDKAFKA = {"linger.ms": 5, "batch.size": 1_000_000, "queue.buffering.max.kbytes": 131_072}
QUIET_S = 1.0
RUNNING = "a compaction is already running"
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Contents:
    """What each record is, by topic, partition and offset."""

    record_bytes: int
    noise: bytes

    @classmethod
    def of(cls, record_bytes: int) -> Contents:
        """The same in each process."""
        return cls(record_bytes, random.Random(1).randbytes(NOISE_BYTES + record_bytes))

    def value(self, topic: str, partition: int, number: int) -> bytes:
        """Return one record: 16 bytes that say what it is, and noise."""
        head = topic[0].encode() + partition.to_bytes(3, "big") + number.to_bytes(12, "big")
        at = (number * 7919 + partition * 104_729 + (0 if topic == SOURCE else 31)) % NOISE_BYTES
        return head + self.noise[at : at + self.record_bytes - 16]


@dataclass
class Sides:
    """How far each side is."""

    partitions: int
    ends: dict[str, list[int]] = field(default_factory=dict)
    starts: dict[str, list[int]] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)

    def owner(self, topic: str, partition: int, offset: int) -> str:
        """Return the topic to which an offset was written."""
        return SOURCE if topic == SOURCE or offset < self.cuts[partition] else BRANCH


class Spent(NamedTuple):
    """What went to the bucket for uploads: puts, and their bytes."""

    puts: float
    size: float


class Done(NamedTuple):
    """What a request took."""

    answer: dict[str, Any]
    milliseconds: float
    spent: Spent
    """What went to the bucket meanwhile."""

    def told(self) -> str:
        """Return a figure of the table."""
        return f"{self.milliseconds:,.0f} ms, {self.spent.puts:.0f} PUTs, {self.spent.size:,.0f} bytes"


# --- clients, in separate processes ----------------------------------------------------------------------------------


def produce(bootstrap: str, contents: Contents, topic: str, ranges: list[tuple[int, int]], put: Any) -> None:
    """Produce the numbers of each partition's range; each becomes its offset."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **LIBRDKAFKA})
    producer.list_topics(topic, 30)
    at = [first for first, _ in ranges]
    while any(number < end for number, (_, end) in zip(at, ranges, strict=True)):
        for partition, (_, end) in enumerate(ranges):
            last = min(end, at[partition] + AT_A_TIME)
            batch = [{"value": contents.value(topic, partition, number)} for number in range(at[partition], last)]
            while batch:
                sent = producer.produce_batch(topic, batch, partition=partition)
                batch = batch[sent:] if sent else [one for one in batch if "_error" in one]
                producer.poll(0.001 if batch else 0)
            at[partition] = last
    while len(producer) and producer.flush(60):
        print("  waits for acknowledgements", flush=True)
    flush(producer)
    put(None)


def check(bootstrap: str, contents: Contents, topic: str, sides: Sides, put: Any) -> None:
    """Read a topic from its start; put the number of records, or raise at the first that is wrong or missing."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "check.crcs": True}
    )
    at: dict[int, int] = {}
    for partition in range(sides.partitions):
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), 60)
        assert high == sides.ends[topic][partition], (topic, partition, high, sides.ends[topic][partition])
        assert low <= sides.starts[topic][partition], f"{topic}-{partition} starts at {low}: nobody deleted so much"
        at[partition] = low
    consumer.assign([TopicPartition(topic, partition, low) for partition, low in at.items()])
    count, deadline = 0, time.monotonic() + PATIENCE_S
    while any(at[partition] < sides.ends[topic][partition] for partition in at):
        assert time.monotonic() < deadline, f"{topic}: the reader does not get on: {at}"
        for message in consumer.consume(1_000, 1.0):
            assert message.error() is None, message.error()
            number, offset = message.partition(), message.offset()
            assert number is not None and offset is not None
            assert offset == at[number], f"{topic}-{number}: {offset} after {at[number]}"
            wanted = contents.value(sides.owner(topic, number, offset), number, offset)
            assert message.value() == wanted, f"{topic}-{number}: another record at offset {offset}"
            at[number] += 1
            count += 1
    consumer.close()
    put(count)


def delete_records(bootstrap: str, topic: str, offsets: list[int], put: Any) -> None:
    """Move the log start of each partition."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap})
    wanted = [TopicPartition(topic, partition, offset) for partition, offset in enumerate(offsets)]
    for future in admin.delete_records(wanted, request_timeout=60).values():
        future.result(120)
    put(None)


def first_record(bootstrap: str, contents: Contents, partition: int, number: int, put: Any) -> None:
    """Write one record to the branch, read it, and put the seconds."""
    from confluent_kafka import Consumer, Producer, TopicPartition

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "first", "enable.auto.commit": False})
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    producer.list_topics(SOURCE, 30)
    began = time.perf_counter()
    producer.produce(BRANCH, contents.value(BRANCH, partition, number), partition=partition)
    flush(producer)
    consumer.assign([TopicPartition(BRANCH, partition, number)])
    message = consumer.poll(30)
    assert message is not None and message.error() is None and message.offset() == number
    put(time.perf_counter() - began)
    consumer.close()


# --- the broker ------------------------------------------------------------------------------------------------------


class Cluster:
    """The admin HTTP of the one broker."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def connection(self) -> ClusterConnection:
        """A new one: the broker may have been started anew."""
        return ClusterConnection(self.bootstrap)

    def spent(self) -> Spent:
        """Return what uploads have written, and all else but compaction and the metadata's state."""
        purposes = self.connection().get("/bucket/usage")["purposes"]
        mine = [one for name, one in purposes.items() if name not in ("compaction", "metadata")]
        return Spent(sum(one["requests"].get("put", 0) for one in mine), sum(one["sent_bytes"] for one in mine))

    def upload(self) -> None:
        """Put everything into the bucket."""
        request = urllib.request.Request(self.connection().admin_url + "/upload", method="POST")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            response.read()

    def compact(self) -> int:
        """Compact objects until there is nothing left to do; return the number of tasks."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                lines = list(self.connection().post_lines("/compaction?eager=true&unthrottled=true"))
            except Unavailable as error:
                if RUNNING not in str(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(QUIET_S)  # the broker's own round, after which this one finds what it has left
                continue
            return sum(line.get("tasks", 0) for line in lines if line["event"] == "done")

    def timed(self, path: str, pairs: Iterable[tuple[str, str]]) -> Done:
        """Post, and return what it took."""
        connection, before = self.connection(), self.spent()
        assert connection.admin_url
        began = time.perf_counter()
        answer = connection.post(f"{path}?{urlencode(list(pairs))}")
        milliseconds = (time.perf_counter() - began) * 1e3
        after = self.spent()
        return Done(answer, milliseconds, Spent(after.puts - before.puts, after.size - before.size))


def measure(arguments: argparse.Namespace, cluster: Cluster, contents: Contents, restart: Callable[[], None]) -> None:
    """Fill, take, branch, let both go on, and check."""
    bootstrap, partitions = cluster.bootstrap, arguments.partitions
    per_partition = int(arguments.gb * (1 << 30)) // arguments.record_bytes // partitions
    a_round = (arguments.round_mb << 20) // arguments.record_bytes // partitions
    create_topic(bootstrap, SOURCE, partitions, {"retention.ms": "-1", "segment.bytes": str(64 << 20)})
    began = time.perf_counter()
    in_process(produce, bootstrap, contents, SOURCE, [(0, per_partition)] * partitions)
    print(f"  filled in {time.perf_counter() - began:.0f} s", flush=True)
    cluster.upload()
    cluster.compact()
    done = cluster.timed("/snapshots", [("name", "all-uploaded"), ("topic", SOURCE)])
    row("snapshot of a topic that is uploaded", done.told())
    sides = Sides(partitions)
    end = per_partition + a_round
    in_process(produce, bootstrap, contents, SOURCE, [(per_partition, end)] * partitions)
    done = cluster.timed("/snapshots", [("name", SNAPSHOT), ("topic", SOURCE)])
    row(f"snapshot with {arguments.round_mb} MB produced just before", done.told())
    sides.cuts = [end] * partitions
    branch = [("snapshot", SNAPSHOT), ("source", SOURCE), ("name", BRANCH)]
    done = cluster.timed("/branches", branch)
    size, objects = done.answer["object_bytes"], done.answer["objects"]
    row(f"branch of {size / (1 << 30):.2f} GB in {objects} objects", done.told())
    seconds = in_process(first_record, bootstrap, contents, 0, end)
    row("first record written to the branch and read again", f"{seconds * 1e3:,.0f} ms")
    sides.ends = {SOURCE: [end] * partitions, BRANCH: [end + (partition == 0) for partition in range(partitions)]}
    sides.starts = {SOURCE: [0] * partitions, BRANCH: [0] * partitions}
    diverge(arguments, cluster, contents, sides, restart, a_round)


def diverge(
    arguments: argparse.Namespace,
    cluster: Cluster,
    contents: Contents,
    sides: Sides,
    restart: Callable[[], None],
    a_round: int,
) -> None:
    """Let both sides go on, and check each."""
    bootstrap, began, tasks = cluster.bootstrap, time.perf_counter(), 0
    for number in range(arguments.rounds):
        for topic in (SOURCE, BRANCH):
            ranges = [(first, first + a_round) for first in sides.ends[topic]]
            in_process(produce, bootstrap, contents, topic, ranges)
            sides.ends[topic] = [end for _, end in ranges]
        topic = (SOURCE, BRANCH)[number % 2]
        sides.starts[topic] = [start + sides.cuts[0] // 20 for start in sides.starts[topic]]
        in_process(delete_records, bootstrap, topic, sides.starts[topic])
        cluster.upload()
        tasks += cluster.compact()
        if number == arguments.rounds // 2:
            for name in ("all-uploaded", SNAPSHOT):
                cluster.connection().post(f"/snapshots/delete?{urlencode({'name': name})}")
            restart()
        print(f"  round {number + 1} of {arguments.rounds}", flush=True)
    row("rounds of diverging", f"{arguments.rounds} in {time.perf_counter() - began:.0f} s, {tasks} compactions")
    for topic in (SOURCE, BRANCH):
        count = in_process(check, bootstrap, contents, topic, sides)
        row(f"records of the {topic} that are as produced", f"{count:,} of {count:,}", goal="all", holds=True)
    in_process(drop, bootstrap, SOURCE)
    time.sleep(QUIET_S)  # the objects of the topic alone are deleted now
    count = in_process(check, bootstrap, contents, BRANCH, sides)
    row("records of the branch after its topic was deleted", f"{count:,} of {count:,}", goal="all", holds=True)


def drop(bootstrap: str, topic: str, put: Any) -> None:
    """Delete a topic."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap})  # which lives until the answer is there
    admin.delete_topics([topic])[topic].result(60)
    put(None)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.05 if quick() else 5.0)
    parser.add_argument("--rounds", type=int, default=2 if quick() else 12)
    parser.add_argument("--round-mb", type=int, default=4 if quick() else 64)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--record-bytes", type=int, default=4096)
    parser.add_argument("--dir")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    contents = Contents.of(arguments.record_bytes)
    with directory(arguments.dir) as base, broker(base / "data", [*SETTINGS, *arguments.set]) as process:

        def restart() -> None:
            process.kill_broker()
            process.wait_for_line("ready again")

        measure(arguments, Cluster(process.bootstrap), contents, restart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
