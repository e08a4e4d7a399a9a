"""What log compaction costs: a topic of many records and few keys, compacted while a producer writes to another topic.

    python -m bench.log_compaction [--gb 5] [--keys 100000] [--produce-mb 20] [--alone 30] [--record-bytes 1024]
                                   [--dir DIR] [--set section.key=value]

A real `tidelog up` with a MinIO on this machine. One partition is filled with records of random keys, at librdkafka's
speed, and uploaded. Then librdkafka produces at a constant rate to another topic (short retention), for `--alone`
seconds while nothing is compacted, and on while the filled topic is: its `min.cleanable.dirty.ratio` is lowered, and
the run goes on until a whole round is done and nothing of the topic is due. The latency of an acknowledgement is
librdkafka's own (`Message.latency`), which includes its `linger.ms`. Printed:

- the producer's throughput and latencies in both parts, and what it loses;
- seconds, bytes and requests of the compaction, by the broker's own metrics: purpose `compaction`, and `cold` for the
  reading of the keys, as nothing else reads history here;
- commands of the controller and bytes of its snapshot: those of the part without compaction, times the seconds, are
  taken off the commands;
- memory of the broker and its worker, sampled (RSS), beside the same before the round, and the bound on the keys;
- the records before and after, and whether a consumer from offset 0 finds each key's last value: else the run fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bench._bucket import bucket, environment
from bench._clients import create_topic, flush
from bench._common import (
    background,
    broker,
    cpu_seconds,
    directory,
    in_process,
    percentile,
    quick,
    row,
    settle,
    spawned,
)
from bench.cost_per_gb import Figures
from tests.support.tidelog_process import TidelogProcess
from tidelog.chaos.ports import free_port

TABLE, WRITES = "table", "writes"
SEGMENT_BYTES = 64 << 20
NEVER, AT_ONCE = "1.0", "0.01"
"""`min.cleanable.dirty.ratio`: the share of dirty bytes is never above 1."""
CONFIG = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": NEVER, "segment.bytes": str(SEGMENT_BYTES)}
KEPT = {"retention.bytes": str(256 << 20), "segment.bytes": str(SEGMENT_BYTES)}
"""Retention of the produced records: the disk need not hold them all."""
SETTINGS = (
    "log.cleaner_interval_ms=1000",
    "log.retention_check_interval_ms=1000",
    "upload.delete_delay_ms=5000",
    "compaction.enabled=false",
)
"""Without the compaction of objects, whose requests have the same purpose."""
LIBRDKAFKA = {"linger.ms": 5, "batch.size": 1_000_000, "queue.buffering.max.kbytes": 65_536}
AT_A_TIME = 1_000
PRODUCED_BYTES = 1024
WARM_S = 3.0
CATCH_UP_S = 0.25
"""The producer makes up for a delay of so much at most: else it would write more after it than its rate."""
PATIENCE_S = 3_600.0
GOAL = 0.1
NOISE_BYTES = 1 << 20


class Load(NamedTuple):
    """What the filled topic consists of."""

    records: int
    keys: int
    record_bytes: int

    def values(self) -> Iterator[tuple[bytes, bytes]]:
        """All records, in order; the same in each process."""
        rng = random.Random(1)
        noise = rng.randbytes(NOISE_BYTES + self.record_bytes)
        for number in range(self.records):
            at = number * 7919 % NOISE_BYTES
            yield (
                b"key-%010d" % int(rng.random() * self.keys),
                number.to_bytes(8, "big") + noise[at : at + self.record_bytes - 8],
            )


class Produced(NamedTuple):
    """One part of a producer's run."""

    mb_per_s: float
    latencies_ms: tuple[float, float, float]
    """p50, p99, p99.9."""
    seconds: float


class Sample(NamedTuple):
    """Memory at one time, in bytes."""

    broker: int
    worker: int


# --- clients, in separate processes ----------------------------------------------------------------------------------


def fill(bootstrap: str, load: Load, put: Callable[[Any], None]) -> None:
    """Produce all records; put the seconds that it took."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **LIBRDKAFKA})
    producer.list_topics(TABLE, 10)
    started = time.perf_counter()
    batch: list[dict[str, Any]] = []
    for key, value in load.values():
        batch.append({"key": key, "value": value})
        if len(batch) == AT_A_TIME:
            _send(producer, batch)
            batch = []
    _send(producer, batch)
    flush(producer)
    put(time.perf_counter() - started)


def _send(producer: Any, batch: list[dict[str, Any]]) -> None:
    while batch:
        sent = producer.produce_batch(TABLE, batch, partition=0)
        batch = batch[sent:] if sent else [one for one in batch if "_error" in one]
        producer.poll(0.001 if batch else 0)


def produce_at(bootstrap: str, mb_per_s: float, parts: Any, put: Callable[[Any], None]) -> None:
    """Produce at a constant rate; put None first, and a `Produced` each time `parts` has True; end at False."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", **LIBRDKAFKA})
    value = os.urandom(PRODUCED_BYTES)
    latencies: list[float] = []

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            raise RuntimeError(str(error))
        latencies.append(message.latency() * 1e3)

    producer.list_topics(WRITES, 10)
    put(None)
    started = since = time.perf_counter()
    sent, goes_on = 0, True
    while goes_on:
        now = time.perf_counter()
        started = max(started, now - CATCH_UP_S - sent / mb_per_s / 1e6)
        if sent <= (now - started) * mb_per_s * 1e6:
            with contextlib.suppress(BufferError):  # the broker does not keep up: the throughput shows it
                producer.produce(WRITES, value, on_delivery=delivered)
                sent += PRODUCED_BYTES
                continue
        producer.poll(0.001)
        if not parts.empty() and (goes_on := parts.get()):
            seconds = time.perf_counter() - since
            levels = tuple(percentile(latencies, part) for part in (0.5, 0.99, 0.999))
            put(Produced(len(latencies) * PRODUCED_BYTES / 1e6 / seconds, levels, seconds))  # type: ignore[arg-type]
            latencies.clear()
            since = time.perf_counter()
    flush(producer)


def read_back(bootstrap: str, load: Load, put: Callable[[Any], None]) -> None:
    """Read the table from offset 0; put the number of its records, and of keys with a wrong last value."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    settings = {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "check.crcs": True}
    consumer = Consumer({**settings, "enable.partition.eof": True})
    consumer.assign([TopicPartition(TABLE, 0, OFFSET_BEGINNING)])
    found: dict[bytes, bytes] = {}
    count, at, ended = 0, -1, False
    deadline = time.monotonic() + PATIENCE_S
    while not ended and time.monotonic() < deadline:
        for message in consumer.consume(1_000, 1.0):
            error, offset, key, value = message.error(), message.offset(), message.key(), message.value()
            if error is not None:
                assert error.name() == "_PARTITION_EOF", error
                ended = True
                continue
            assert offset is not None and offset > at, "offsets go forward only"
            assert isinstance(key, bytes) and isinstance(value, bytes)
            at = offset
            count += 1
            found[key] = value
    consumer.close()
    assert ended, "the reader has not come to the end"
    wanted = {key: value[:8] for key, value in load.values()}
    wrong = sum(found.get(key, b"")[:8] != value for key, value in wanted.items()) + len(found.keys() - wanted.keys())
    put((count, wrong))


# --- the broker ------------------------------------------------------------------------------------------------------


class Watched:
    """The broker, its metrics, and a thread that samples its memory."""

    def __init__(self, tidelog: TidelogProcess, admin_port: int) -> None:
        self.tidelog = tidelog
        self.metrics = Figures(admin_port)
        self._status = f"http://127.0.0.1:{admin_port}/status"
        self._done = threading.Event()
        self.samples: list[Sample] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        pid = self.tidelog.broker_pid()
        while not self._done.wait(0.1):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self.samples.append(
                Sample(rss_bytes(pid), sum(rss_bytes(int(each)) for each in children if is_worker(each)))
            )

    def partition(self) -> dict[str, Any]:
        """What the broker says of the table's compaction."""
        with urllib.request.urlopen(self._status, timeout=30) as answer:
            section = json.load(answer)["log_compaction"]
        (found,) = [one for one in section["partitions"] if one["topic"] == TABLE]
        return {**section, **found}

    def figure(self, name: str) -> float:
        """A metric without labels."""
        return self.metrics.read()[f"tidelog_{name}", "", ""]

    def peak(self) -> Sample:
        """The largest figures since the last call."""
        taken, self.samples = self.samples, []
        return Sample(max(one.broker for one in taken), max(one.worker for one in taken))


def is_worker(pid: str) -> bool:
    """Whether a child of the broker decides a round. Before it runs its program, it has the broker's memory."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return b"cleaning_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) << 10
    return 0


def wait(for_what: str, ready: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition. Raises `TimeoutError`."""
    deadline = time.monotonic() + patience_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(for_what)
        time.sleep(0.2)


def set_dirty_ratio(bootstrap: str, value: str) -> None:
    """Change `min.cleanable.dirty.ratio` of the table."""
    from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    entry = ConfigEntry("min.cleanable.dirty.ratio", value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, TABLE, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)


class Counts(NamedTuple):
    """Counters of the broker, all of them since its start."""

    requests: Counter[tuple[str, str]]
    bytes: Counter[tuple[str, str]]
    commands: int
    cpu_s: float
    when: float

    @classmethod
    def now(cls, watched: Watched) -> Counts:
        """Read them."""
        found = watched.metrics.read()
        transferred = {
            (purpose, kind): int(value)
            for (name, purpose, kind), value in found.items()
            if name == "tidelog_bucket_bytes_total"
        }
        return cls(
            watched.metrics.requests(),
            Counter(transferred),
            int(found["tidelog_image_version", "", ""]),
            cpu_seconds(watched.tidelog.broker_pid()),
            time.perf_counter(),
        )


def measure(watched: Watched, args: argparse.Namespace, load: Load) -> None:
    """Fill, produce alone, produce beside the compaction, read back, and print."""
    bootstrap = watched.tidelog.bootstrap
    create_topic(bootstrap, TABLE, 1, CONFIG)
    create_topic(bootstrap, WRITES, 4, KEPT)
    filled = in_process(fill, bootstrap, load)
    size = load.records * load.record_bytes
    print(f"  filled with {size / 1e9:.2f} GB in {filled:.0f} s", flush=True)
    wait("the upload", lambda: not watched.figure("storage_log_cache_pending_bytes"))
    wait("a plan", lambda: watched.partition()["dirty_bytes"] > size // 2, 120)
    settle(watched.tidelog.broker_pid())
    planned = watched.partition()["dirty_bytes"]
    parts: Any = spawned.Queue()
    with background(produce_at, bootstrap, args.produce_mb, parts) as produced:
        produced()
        time.sleep(WARM_S)
        parts.put(True)
        produced()
        before, idle = Counts.now(watched), watched.peak()
        time.sleep(args.alone)
        parts.put(True)
        alone: Produced = produced()
        began, idle = Counts.now(watched), watched.peak()
        state_before = watched.figure("metadata_state_bytes")
        set_dirty_ratio(bootstrap, AT_ONCE)
        wait("a round", lambda: _is_done(watched))
        parts.put(True)
        beside: Produced = produced()
        ended, peak = Counts.now(watched), watched.peak()
        parts.put(False)
    seconds = ended.when - began.when
    per_s = (began.commands - before.commands) / (began.when - before.when)
    commands = max(0.0, ended.commands - began.commands - per_s * seconds)
    print(f"  compacted {planned / 1e9:.2f} GB dirty in {seconds:.1f} s", flush=True)
    report_producer(alone, beside, args.produce_mb)
    report_cost(Cost(began, ended, seconds, planned / 1e9, commands))
    state_after = watched.figure("metadata_state_bytes")
    row(
        "log compaction, metadata",
        f"{commands / (planned / 1e9):,.0f} commands per GB",
        limit=f"snapshot {state_before:,.0f} bytes before, {state_after:,.0f} after",
    )
    keys = watched.partition()["keys"]
    row(
        "log compaction, memory",
        f"broker {peak.broker / 2**20:,.0f} MiB, worker {peak.worker / 2**20:,.0f} MiB",
        limit=f"before {idle.broker / 2**20:,.0f} MiB",
        ratio=f"{keys:,.0f} keys",
    )
    left, wrong = in_process(read_back, bootstrap, load)
    print("\n".join(line for line in watched.tidelog.output if "log compact" in line), flush=True)
    report_records(load.records, left, wrong)


def _is_done(watched: Watched) -> bool:
    found = watched.partition()
    assert not found["problem"], found
    return bool(found["rounds"] >= 1 and found["dirty_ratio"] < 0.05 and not found["running"])


class Cost(NamedTuple):
    """The counters around the compaction."""

    began: Counts
    ended: Counts
    seconds: float
    gb: float
    commands: float


def report_producer(alone: Produced, beside: Produced, mb_per_s: float) -> None:
    """Print what the producer loses."""
    lost = 1 - beside.mb_per_s / alone.mb_per_s
    row(
        f"producer at {mb_per_s:g} MB/s beside log compaction",
        f"{beside.mb_per_s:.1f} MB/s",
        limit=f"alone {alone.mb_per_s:.1f} MB/s",
        ratio=f"loses {lost:.1%}",
        goal="lose ≤ 10 %",
        holds=lost <= GOAL,
    )
    for name, ours, theirs in zip(("p50", "p99", "p99.9"), beside.latencies_ms, alone.latencies_ms, strict=True):
        row(
            f"its acknowledgements, {name}",
            f"{ours:.1f} ms",
            limit=f"alone {theirs:.1f} ms",
            ratio=f"{ours / theirs:.2f}",
        )


def report_cost(cost: Cost) -> None:
    """Print seconds, bytes and requests."""
    requests, transferred = cost.ended.requests - cost.began.requests, cost.ended.bytes - cost.began.bytes
    mine = {kind: count for kind, count in requests.items() if kind[0] in ("compaction", "cold")}
    read = sum(transferred[purpose, "received"] for purpose in ("compaction", "cold")) / 1e9
    written = transferred["compaction", "sent"] / 1e9
    cpu = cost.ended.cpu_s - cost.began.cpu_s
    row(
        "log compaction",
        f"{cost.seconds:.1f} s, {cost.gb / cost.seconds * 1e3:.1f} MB/s",
        limit=f"{cost.gb:.2f} GB dirty",
        ratio=f"broker {cpu:.1f} CPU s, producing included",
    )
    row(
        "log compaction, bucket",
        f"read {read:.2f} GB, written {written:.2f} GB",
        limit=", ".join(f"{purpose} {kind} {count}" for (purpose, kind), count in sorted(mine.items())),
        ratio=f"{sum(mine.values()) / cost.gb:,.0f} requests per GB",
    )


def report_records(before: int, left: int, wrong: int) -> None:
    """Print what is left. Raises `RuntimeError` if keys have not their last values: that is no figure, but a loss."""
    row(
        "log compaction, records",
        f"{left:,} left",
        limit=f"{before:,} before",
        ratio=f"{left / before:.3f}",
        goal="no wrong key",
        holds=wrong == 0,
    )
    if wrong:
        raise RuntimeError(f"{wrong:,} keys have not their last values after the compaction")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.2 if quick() else 5.0)
    parser.add_argument("--keys", type=int, default=10_000 if quick() else 100_000)
    parser.add_argument("--produce-mb", type=float, default=20.0)
    parser.add_argument("--alone", type=float, default=5.0 if quick() else 30.0, help="seconds without compaction")
    parser.add_argument("--record-bytes", type=int, default=1024, help="of the compacted topic")
    parser.add_argument("--dir", help="where the data goes (default: a temporary folder)")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="of the broker")
    args = parser.parse_args()
    load = Load(int(args.gb * 1e9) // args.record_bytes, args.keys, args.record_bytes)
    with bucket("minio", args.dir) as one, directory(args.dir) as data:
        port = free_port()
        settings = [*SETTINGS, f"admin.port={port}", f"s3.endpoint={one.s3.endpoint}", f"s3.bucket={one.s3.bucket}"]
        with (
            mock.patch.dict("os.environ", environment()),
            broker(data / "data", [*settings, *args.set]) as tidelog,
            Watched(tidelog, port) as watched,
        ):
            measure(watched, args, load)


if __name__ == "__main__":
    main()
