"""How long a partition takes no writes, and gives no reads, while it moves between brokers.

    python -m bench.partition_moves [--moves 60] [--partitions 30] [--rate-mb 4] [--side-by-side 4] [--defaults]

Three brokers as processes, a topic of `--partitions`; one idempotent confluent-kafka producer writes to all of them at
a constant rate, one consumer reads all. Partitions are moved to the next broker, some side by side. A partition's stall
is the longest gap between two acknowledgements that overlaps its move; the same load without moves gives the gap that
there is anyway. Afterwards everything is read back: nothing may be lost, doubled or reordered.

librdkafka waits before it tries again: `retry.backoff.ms` of the producer and `fetch.error.backoff.ms` of the consumer
are 10 here; with `--defaults` they are what they are without a word (100 and 500), and in every figure.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition

from bench._common import row
from tests.e2e.backends import create_topic
from tests.support.cluster_process import eventually, up_cluster
from tidelog.client import Cluster

TOPIC = "moved"
RECORD_BYTES = 4_096
SETTLE_S = 0.5
"""After a move: the acknowledgement that ends its gap comes within this."""


class Writer:
    """A producer at a constant rate; the times of all acknowledgements by partition."""

    def __init__(self, bootstrap: str, partitions: int, rate_bytes: float, defaults: bool) -> None:
        config: dict[str, Any] = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0}
        if not defaults:
            config |= {"retry.backoff.ms": 10, "linger.ms": 2}
        self._producer = Producer(config)
        self._partitions = partitions
        self._interval_s = RECORD_BYTES / rate_bytes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.acks: list[list[float]] = [[] for _ in range(partitions)]
        self.offsets: list[list[int]] = [[] for _ in range(partitions)]
        self.errors: list[str] = []
        self._thread.start()

    def _acked(self, error: KafkaError | None, message: Message) -> None:
        partition, offset = message.partition(), message.offset()
        if error is not None or partition is None or offset is None:
            self.errors.append(str(error))
            return
        self.acks[partition].append(time.monotonic())
        self.offsets[partition].append(offset)

    def _run(self) -> None:
        payload = bytes(RECORD_BYTES - 8)
        number, due = 0, time.monotonic()
        while not self._stopping.is_set():
            while due <= time.monotonic():
                value = number.to_bytes(8, "big") + payload
                self._producer.produce(TOPIC, value, partition=number % self._partitions, on_delivery=self._acked)
                number += 1
                due += self._interval_s
                self._producer.poll(0)
            self._producer.poll(max(0.0, min(0.002, due - time.monotonic())))
        self._producer.flush(60)

    def stop(self) -> None:
        """End the load; everything was acknowledged or failed."""
        self._stopping.set()
        self._thread.join(90)


class Reader:
    """A consumer of all partitions; the times of arrival, and whether offsets came in order, each once."""

    def __init__(self, bootstrap: str, partitions: int, defaults: bool) -> None:
        config: dict[str, Any] = {"bootstrap.servers": bootstrap, "group.id": "bench", "log_level": 0}
        if not defaults:
            config |= {"retry.backoff.ms": 10, "fetch.error.backoff.ms": 10}
        self._consumer = Consumer({**config, "enable.auto.commit": False})
        self._consumer.assign([TopicPartition(TOPIC, each, OFFSET_BEGINNING) for each in range(partitions)])
        self._stopping = threading.Event()
        self.times: list[list[float]] = [[] for _ in range(partitions)]
        self.next_offset = [0] * partitions
        self.disorder = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            now = 0.0
            for message in self._consumer.consume(1_000, 0.005):
                now = now or time.monotonic()
                partition, offset = message.partition(), message.offset()
                if message.error() is not None or partition is None or offset is None:
                    continue
                self.disorder += offset != self.next_offset[partition]
                self.next_offset[partition] = offset + 1
                self.times[partition].append(now)
        self._consumer.close()

    def stop(self) -> None:
        """Stop reading."""
        self._stopping.set()
        self._thread.join(60)


def longest_gap_ms(times: list[float], start: float, end: float) -> float:
    """The longest gap between neighbours that overlaps `[start, end]`, in ms."""
    first = max(0, bisect_left(times, start) - 1)
    last = min(len(times), bisect_left(times, end) + 1)
    window = times[first:last]
    return max((later - earlier for earlier, later in pairwise(window)), default=0.0) * 1000


def move_all(cluster: Cluster, moves: int, partitions: int, side_by_side: int) -> list[tuple[int, float, float]]:
    """Move partitions on to the next broker, wave after wave; `(partition, from, to)` in monotonic seconds."""
    spans: list[tuple[int, float, float]] = []
    at = 0
    while len(spans) < moves:
        wave = [(at + step) % partitions for step in range(min(side_by_side, moves - len(spans)))]
        at += len(wave)
        rows = {each["partition"]: each for each in cluster.get(f"/partitions?topic={TOPIC}")["partitions"]}
        wanted = {each: rows[each]["broker"] % 3 + 1 for each in wave}
        started = time.monotonic()
        body = {"moves": [{"topic": TOPIC, "partition": each, "to": to} for each, to in wanted.items()]}
        assert all(one["error"] is None for one in cluster.post("/moves", body)["results"])

        def arrived(wanted: dict[int, int] = wanted) -> bool:
            now = cluster.get(f"/partitions?topic={TOPIC}")["partitions"]
            return all(now[each]["broker"] == to for each, to in wanted.items())

        eventually(arrived)
        time.sleep(SETTLE_S)
        spans += [(each, started, time.monotonic()) for each in wave]
    return spans


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """p50, p99, max."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], ordered[-1]


def measure(options: argparse.Namespace, directory: Path) -> None:
    """One run."""
    with up_cluster(directory) as up:
        create_topic(up.bootstrap, TOPIC, options.partitions)
        cluster = Cluster(up.bootstrap)
        writer = Writer(up.bootstrap, options.partitions, options.rate_mb * 1e6, options.defaults)
        reader = Reader(up.bootstrap, options.partitions, options.defaults)
        eventually(lambda: all(len(times) > 20 for times in writer.acks))
        quiet_from = time.monotonic()
        time.sleep(5.0)
        quiet_to = time.monotonic()
        spans = move_all(cluster, options.moves, options.partitions, options.side_by_side)
        writer.stop()
        eventually(lambda: all(reader.next_offset[n] >= len(writer.offsets[n]) for n in range(options.partitions)))
        reader.stop()
        steps = [one for node in cluster.get("/status")["nodes"] for one in _moves_of(node["admin_url"])]
    assert not writer.errors, writer.errors[:3]
    assert not reader.disorder, f"{reader.disorder} records out of order or twice"
    assert all(sorted(offsets) == list(range(len(offsets))) for offsets in writer.offsets), "offsets lost or twice"
    report(options, writer, reader, spans, (quiet_from, quiet_to), steps)


def _moves_of(url: str) -> list[dict[str, Any]]:
    from tidelog.client import http_json

    return [one for one in http_json(url, "/moves")["moves"] if one["phase"] == "done"]


def report(
    options: argparse.Namespace,
    writer: Writer,
    reader: Reader,
    spans: list[tuple[int, float, float]],
    quiet: tuple[float, float],
    steps: list[dict[str, Any]],
) -> None:
    """Print the lines."""
    kind = "defaults" if options.defaults else "back-offs 10 ms"
    print(
        f"{len(spans)} moves, {options.side_by_side} side by side, {options.partitions} partitions, "
        f"{options.rate_mb} MB/s, {sum(map(len, writer.offsets))} records; librdkafka {kind}"
    )
    for name, series in (("producer", writer.acks), ("consumer", reader.times)):
        base = percentiles([longest_gap_ms(times, *quiet) for times in series])
        p50, p99, top = percentiles([longest_gap_ms(series[each], start, end) for each, start, end in spans])
        row(
            f"{name}'s stall in a move, {kind}",
            f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {top:.0f} ms",
            limit=f"without moves p50 {base[0]:.0f} ms, max {base[2]:.0f} ms",
            ratio=f"{p50 / max(base[0], 1e-3):.1f} (p50)",
            goal="p50 ≤ 80 ms, p99 ≤ 300 ms, max ≤ 1 s",
            holds=p50 <= 80 and p99 <= 300 and top <= 1_000,
        )
    for name in ("close", "drain", "hand_over"):
        p50, p99, top = percentiles([one["steps_ms"][name] for one in steps])
        print(f"  step {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {top:.1f} ms")
    sizes = sorted(one["drained_bytes"] for one in steps)
    print(f"  uploaded while closed: median {statistics.median(sizes):.0f} bytes, max {sizes[-1]}")


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=60)
    parser.add_argument("--partitions", type=int, default=30)
    parser.add_argument("--rate-mb", type=float, default=4.0)
    parser.add_argument("--side-by-side", type=int, default=4)
    parser.add_argument("--defaults", action="store_true", help="librdkafka's own back-off")
    with tempfile.TemporaryDirectory(prefix="tidelog-moves-") as directory:
        measure(parser.parse_args(), Path(directory))


if __name__ == "__main__":
    main()
