"""What transactions cost a producer, beside Apache Kafka in turns on this machine.

    python -m bench.transactions [--rounds 3] [--seconds 4] [--peers tidelog,kafka,kafka-synced] [--dir DIR]
                                 [--set section.key=value]   (of Tidelog; may be repeated)

Each round starts every server once, on an empty directory (`bench.peers`), and measures with librdkafka's producer,
1 KiB records, 6 partitions, acks=all:

- an idempotent producer without transactions, at its speed: the limit of the next;
- a transactional producer at its speed, which commits every 100 ms: the ratio is what transactions cost. Both keep at
  most `QUEUE_KB` in their queues, because a commit first waits for everything that is queued;
- the time of `commit_transaction` for `PACED_RECORDS` records that are acknowledged already, ten times a second
  (p50, p99): the decision and, as the next transaction begins with it, the markers of the one before.

Server and client have a core each. `tidelog` syncs before it acknowledges, `kafka` does not, `kafka-synced` has
`log.flush.interval.messages=1`. The rows compare medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench._clients import create_topic, produce_with_librdkafka, records_in, send_batch
from bench._common import directory, in_process, percentile, quick, row, settle
from bench._peers import Peer, peers
from bench.peers import CLIENT, running
from bench.produce_throughput import LIBRDKAFKA

RECORD_BYTES = 1024
PARTITIONS = 6
QUEUE_KB = 8_192
COMMIT_EVERY_S = 0.1
PACED_RECORDS = 100
PATIENCE_S = 60.0
WARM_UP_S = 1.0
RATIO_GOAL = 0.8
SETTINGS = {**LIBRDKAFKA, "queue.buffering.max.kbytes": QUEUE_KB, "linger.ms": 5}
PLAIN, IN_TRANSACTIONS = "idempotent, MB/s", "in transactions of 100 ms, MB/s"
P50, P99 = "commit, p50, ms", "commit, p99, ms"

Figures = dict[str, float]


def _transactional(bootstrap: str, topic: str, name: str) -> Any:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name, "log_level": 3, **SETTINGS})
    producer.list_topics(topic, 10)
    producer.init_transactions(PATIENCE_S)
    return producer


def produce_in_transactions(bootstrap: str, topic: str, seconds: float, put: Callable[[Any], None]) -> None:
    """Put (payload bytes committed, seconds) of a producer that commits every `COMMIT_EVERY_S`."""
    producer = _transactional(bootstrap, topic, "fast")
    value = os.urandom(RECORD_BYTES)
    sent, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        producer.begin_transaction()
        end = time.perf_counter() + COMMIT_EVERY_S
        while time.perf_counter() < end:
            sent += send_batch(producer, topic, value)
        producer.commit_transaction(PATIENCE_S)
    put((sent * RECORD_BYTES, time.perf_counter() - started))


def commit_at_a_pace(bootstrap: str, topic: str, seconds: float, put: Callable[[Any], None]) -> None:
    """Put the seconds that each commit took, at ten transactions a second."""
    producer = _transactional(bootstrap, topic, "paced")
    value = os.urandom(RECORD_BYTES)
    took: list[float] = []
    started = due = time.perf_counter()
    while due < started + seconds:
        producer.begin_transaction()
        for number in range(PACED_RECORDS):
            producer.produce(topic, value, partition=number % PARTITIONS)
        producer.flush(PATIENCE_S)
        before = time.perf_counter()
        producer.commit_transaction(PATIENCE_S)
        took.append(time.perf_counter() - before)
        due += COMMIT_EVERY_S
        time.sleep(max(0.0, due - time.perf_counter()))
    put(took)


def committed_bytes(bootstrap: str, topic: str) -> int:
    """Count the payload that a read_committed consumer finds."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": bootstrap, "group.id": "bench", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    at_end: set[int | None] = set()
    found, deadline = 0, time.monotonic() + PATIENCE_S
    while len(at_end) < PARTITIONS and time.monotonic() < deadline:
        for message in consumer.consume(1000, 1.0):
            value = message.value()
            if message.error() is not None:
                at_end.add(message.partition())
            elif value is not None:
                found += len(value)
    consumer.close()
    return found


def measure(peer: Peer, seconds: float) -> Figures:
    """All figures of one server, once."""
    found: Figures = {}
    with running(peer, {}):
        for topic in ("warm", "plain", "transactions", "paced"):
            create_topic(peer.bootstrap, topic, PARTITIONS)
        in_process(produce_in_transactions, peer.bootstrap, "warm", WARM_UP_S, cores=CLIENT)
        settle(peer.server_pid())
        plain = (peer.bootstrap, "plain", RECORD_BYTES, seconds, {**SETTINGS, "enable.idempotence": True})
        size, took = in_process(produce_with_librdkafka, *plain, cores=CLIENT)
        found[PLAIN] = size / 1e6 / took
        records = records_in(peer.bootstrap, "plain", PARTITIONS)
        assert records * RECORD_BYTES == size, f"{records} records are in the log, {size // RECORD_BYTES} were sent"
        settle(peer.server_pid())
        size, took = in_process(produce_in_transactions, peer.bootstrap, "transactions", seconds, cores=CLIENT)
        found[IN_TRANSACTIONS] = size / 1e6 / took
        read = committed_bytes(peer.bootstrap, "transactions")
        assert read == size, f"{read} bytes are committed, {size} were sent"
        settle(peer.server_pid())
        paced = in_process(commit_at_a_pace, peer.bootstrap, "paced", seconds, cores=CLIENT)
        found[P50], found[P99] = percentile(paced, 0.5) * 1e3, percentile(paced, 0.99) * 1e3
    return found


def report(of: dict[str, list[Figures]]) -> None:
    """Print what transactions cost each server, and commits beside each peer."""
    medians = {name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in of.items()}
    for name, figures in medians.items():
        ratio, ours = figures[IN_TRANSACTIONS] / figures[PLAIN], name == "tidelog"
        row(
            f"{name}, {IN_TRANSACTIONS}",
            f"{figures[IN_TRANSACTIONS]:.4g}",
            limit=f"{PLAIN} {figures[PLAIN]:.4g}",
            ratio=f"{ratio:.2f}",
            goal=f"≥ {RATIO_GOAL}" if ours else "",
            holds=ratio >= RATIO_GOAL if ours else None,
        )
    ours_alone = medians.pop("tidelog", {})
    for key in (P50, P99) if ours_alone else ():
        for name, theirs in medians.items():
            ratio = ours_alone[key] / theirs[key]
            row(f"{key}, beside {name}", f"{ours_alone[key]:.4g}", limit=f"{theirs[key]:.4g}", ratio=f"{ratio:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 if quick() else 3)
    parser.add_argument("--seconds", type=float, default=1.0 if quick() else 4.0)
    parser.add_argument("--peers", default="tidelog,kafka,kafka-synced")
    parser.add_argument("--dir", default=None, help="where the servers write")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="of Tidelog")
    args = parser.parse_args()
    makers = peers(args.peers.split(","), args.set)
    of: dict[str, list[Figures]] = {name: [] for name in makers}
    with directory(args.dir) as path:
        for number in range(args.rounds):
            for name, make in makers.items():
                place = path / f"{name}-{number}"
                figures = measure(make(place), args.seconds)
                shutil.rmtree(place)
                of[name].append(figures)
                print(f"  {name:13s} " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
    report(of)
    return 0 if len(makers) == len(args.peers.split(",")) else 1


if __name__ == "__main__":
    sys.exit(main())
