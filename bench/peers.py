"""Tidelog beside Apache Kafka, in turns, on this machine.

    python -m bench.peers [--rounds 3] [--seconds 4] [--peers tidelog,kafka,kafka-synced] [--dir DIR]
                          [--set section.key=value]   (of Tidelog; may be repeated)

Each round starts every server once, on an empty directory, and measures with the same clients: its start; librdkafka's
producer (1 KiB records, acks=all; to 6 partitions after a warm-up, as in `bench.kafka_cluster`, and to 1); librdkafka's
consumer of what was measured of the former; acknowledgements of 16 KiB batches at 5 MB/s (p50, p99; without a verdict
beside a server that does not keep up, as in `bench.kafka_cluster`); Kafka's Java producer. Server and client have a
core each. Before each server the file system is synced and, where that is allowed, the page cache is emptied, so that
each finds it in the same state. The CPU time is the server's while librdkafka produces to six partitions and until it
is idle again, with its uploads, without those of the warm-up; memory is its resident set then.

`tidelog` has its WAL and its embedded store on that disk, so it writes each byte twice and syncs before it
acknowledges. `kafka` acknowledges from the page cache, as it does by default; `kafka-synced` syncs first, too. The rows
compare medians. Kafka comes from Maven (`localstack/install.py kafka`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench._clients import create_topic, produce_with_librdkafka, records_in
from bench._cluster_load import warm_up
from bench._common import (
    ANSWERED,
    KEEPS_UP,
    answered_share,
    directory,
    in_process,
    percentile,
    pin,
    quick,
    row,
    say_new_pages,
    settle,
)
from bench._peers import Peer, java_producer, peers
from bench.produce_latency import raw_client
from bench.produce_throughput import LIBRDKAFKA

RECORD_BYTES = 1024
LATENCY_BATCH_BYTES = 16_384
LATENCY_MB_PER_S = 5.0
SERVER, CLIENT = {0}, {1}
JAVA_RECORDS = 400_000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Figures = dict[str, float]
P50, P99 = "acknowledged, p50, ms", "acknowledged, p99, ms"
GOALS: tuple[tuple[str, str, float, bool], ...] = (
    # measure, peer, ratio that is the goal, whether more is better
    ("produce to 6 partitions, MB/s", "kafka", 1.5, True),
    (P50, "kafka", 1.5, False),
    (P99, "kafka", 1.0, False),
    ("Java's producer, MB/s", "kafka", 1.0, True),
)


def user_and_system(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process in its own code and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S


def resident_mb(pid: int) -> float:
    """Return the resident set in MB (10^6 bytes)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def consume_with_librdkafka(bootstrap: str, topic: str, records: int, put: Callable[[Any], None]) -> None:
    """Put the seconds from a consumer's first records to the last of `records`, read from the start."""
    from confluent_kafka import Consumer

    settings = {"bootstrap.servers": bootstrap, "group.id": "bench", "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "enable.auto.commit": False, "fetch.message.max.bytes": 1 << 20})
    consumer.subscribe([topic])
    left, started = records, 0.0
    deadline = time.monotonic() + 120
    while left > 0 and time.monotonic() < deadline:
        found = consumer.consume(1000, 1.0)
        started = started or (time.perf_counter() if found else 0.0)  # joining the group is not reading
        left -= len(found)
        for message in found:
            if message.error() is not None:
                raise RuntimeError(str(message.error()))
    if left > 0:
        raise RuntimeError(f"{left} of {records} records did not come")
    put(time.perf_counter() - started)
    consumer.close()


def fresh_page_cache() -> bool:
    """Write all out and empty the page cache; return whether that is allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running(peer: Peer, found: Figures) -> Iterator[Peer]:
    """Start a server and note how long that took; kill it at the end."""
    fresh_page_cache()
    try:
        started = time.perf_counter()
        peer.start()
        found["start, s"] = time.perf_counter() - started
        pin(SERVER, peer.server_pid())
        yield peer
    finally:
        peer.kill()


def measure(peer: Peer, seconds: float, with_java: bool) -> Figures:
    """All figures of one server, once."""
    found: Figures = {}
    with running(peer, found):
        produced = _produce(peer, seconds, found)
        took = in_process(consume_with_librdkafka, peer.bootstrap, "six", produced, cores=CLIENT)
        found["consume, MB/s"] = produced * RECORD_BYTES / 1e6 / took
        _acknowledge(peer, seconds, found)
        if with_java:
            create_topic(peer.bootstrap, "java", 6)
            records = JAVA_RECORDS // (8 if quick() else 1)
            found["Java's producer, MB/s"] = java_producer(peer.bootstrap, "java", RECORD_BYTES, records, CLIENT)
    return found


def _produce(peer: Peer, seconds: float, found: Figures) -> int:
    """Measure the producer; return the number of records in the topic of six partitions."""
    pid = peer.server_pid()
    for topic in ("warm", "six"):
        create_topic(peer.bootstrap, topic, 6)
    warm_up(peer.bootstrap, "warm", CLIENT)
    settle(pid)
    before = user_and_system(pid)
    size, found["produce to 6 partitions, MB/s"] = _produce_to(peer, "six", 6, seconds)
    settle(pid)
    after = user_and_system(pid)
    found["CPU of a GB, user, s"] = (after[0] - before[0]) / (size / 1e9)
    found["CPU of a GB, system, s"] = (after[1] - before[1]) / (size / 1e9)
    found["resident, MB"] = resident_mb(pid)
    create_topic(peer.bootstrap, "one", 1)
    _, found["produce to 1 partition, MB/s"] = _produce_to(peer, "one", 1, seconds)
    return size // RECORD_BYTES


def _produce_to(peer: Peer, topic: str, partitions: int, seconds: float) -> tuple[int, float]:
    """Return the bytes produced, and MB/s."""
    load = (peer.bootstrap, topic, RECORD_BYTES, seconds, LIBRDKAFKA)
    size, took = in_process(produce_with_librdkafka, *load, cores=CLIENT)
    records = records_in(peer.bootstrap, topic, partitions)
    assert records * RECORD_BYTES == size, f"{records} records are in the log, {size // RECORD_BYTES} were sent"
    return size, size / 1e6 / took


def _acknowledge(peer: Peer, seconds: float, found: Figures) -> None:
    host, _, port = peer.bootstrap.rpartition(":")
    create_topic(peer.bootstrap, "paced", 1)
    per_s = LATENCY_MB_PER_S * 1e6 / LATENCY_BATCH_BYTES
    load = ((host, int(port)), "paced", LATENCY_BATCH_BYTES, per_s, seconds)
    latencies = in_process(raw_client, *load, cores=CLIENT)
    found[P50], found[P99] = percentile(latencies, 0.5) * 1e3, percentile(latencies, 0.99) * 1e3
    found[ANSWERED] = answered_share(latencies, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 if quick() else 3)
    parser.add_argument("--seconds", type=float, default=1.0 if quick() else 4.0)
    parser.add_argument("--peers", default="tidelog,kafka,kafka-synced")
    parser.add_argument("--dir", default=None, help="where the servers write")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="of Tidelog")
    args = parser.parse_args()
    say_new_pages()
    makers = peers(args.peers.split(","), args.set)
    with_java = "kafka" in makers or "kafka-synced" in makers
    if not fresh_page_cache():
        print("  the page cache cannot be emptied here: later servers find more of it used", flush=True)
    of: dict[str, list[Figures]] = {name: [] for name in makers}
    with directory(args.dir) as path:
        for number in range(args.rounds):
            for name, make in makers.items():
                place = path / f"{name}-{number}"
                figures = measure(make(place), args.seconds, with_java)
                shutil.rmtree(place)
                of[name].append(figures)
                print(f"  {name:13s} " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
    report(of)
    return 0 if len(makers) == len(args.peers.split(",")) else 1


def report(of: dict[str, list[Figures]]) -> None:
    """Print a row for each measure and peer."""
    medians = {name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in of.items()}
    ours = medians.pop("tidelog", {})
    goals = {(measure, peer): (goal, more) for measure, peer, goal, more in GOALS}
    for key, figure in ours.items():
        for name, theirs in medians.items():
            ratio, (goal, more) = figure / theirs[key], goals.get((key, name), (0.0, True))
            is_queue = key in (P50, P99) and theirs.get(ANSWERED, 1.0) < KEEPS_UP
            row(
                f"{key}, beside {name}",
                f"{figure:.4g}",
                limit=f"{theirs[key]:.4g}{', which does not keep up' if is_queue else ''}",
                ratio=f"{ratio:.2f}",
                goal=f"{'≥' if more else '≤'} {goal}" if goal else "",
                holds=(ratio >= goal if more else ratio <= goal) if goal and not is_queue else None,
            )


if __name__ == "__main__":
    sys.exit(main())
