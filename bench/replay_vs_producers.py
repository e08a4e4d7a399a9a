"""What a replay of the whole history costs the producers of a real `tidelog up`.

    python -m bench.replay_vs_producers [--history-mb 1024] [--seconds 6] [--runs 3] [--mb-per-s 0]

A topic is filled, and lies in the bucket but for what the log cache keeps (128 MiB). Then librdkafka produces records
of 1 KiB (acks=all) to another topic: alone; while a raw consumer replays the history over and over as fast as it is
served; and while a process that uses as much CPU time as that consumer spins (`spin`): what it takes is the machine's
doing, which has two cores for broker, producer and consumer, and not the broker's. The bucket is in memory, as if it
were on other machines; with `--bucket disk` replay, uploads and WAL share one disk. `--wal memory` takes the disk out
of it. `--mb-per-s` holds the producer at a rate instead of letting it go as fast as it can, and prints latencies.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from bench._clients import Consumer, create_topic, produce_with_librdkafka, replay_produce
from bench._common import (
    Spread,
    background,
    broker,
    cpu_seconds,
    directory,
    in_process,
    interleaved,
    percentile,
    quick,
    row,
)
from tests.support.tidelog_process import TidelogProcess

HISTORY = "history"
WRITES = "writes"
PARTITIONS = 4
RECORD_BYTES = 1024
SETTINGS = (
    f"cache.log_bytes={128 << 20}",
    f"upload.size_bytes={16 << 20}",
    "upload.age_ms=1000",
    "upload.delete_delay_ms=0",
    "admin.port=0",
)
LIBRDKAFKA = {"linger.ms": 5, "batch.size": 1_000_000, "queue.buffering.max.kbytes": 65_536}
GOAL = 0.1


class Run(NamedTuple):
    """One run of the producer."""

    mb_per_s: float
    latencies_ms: tuple[float, float]
    """p50 and p99; zeros when it goes as fast as it can."""
    replay_mb_per_s: float
    beside_cores: float
    """CPU time a second of the process beside it."""
    broker_cores: float


def produce_at(bootstrap: str, seconds: float, mb_per_s: float, put: Callable[[Any], None]) -> None:
    """Puts (bytes acknowledged, seconds, p50 and p99 in ms) of a producer that is held at a rate."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", **LIBRDKAFKA})
    value = os.urandom(RECORD_BYTES)
    latencies: list[float] = []

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            raise RuntimeError(str(error))
        latencies.append(message.latency() * 1e3)

    producer.list_topics(WRITES, 10)
    started, sent = time.perf_counter(), 0
    while (now := time.perf_counter()) < started + seconds:
        if sent > (now - started) * mb_per_s * 1e6:
            producer.poll(0.001)
            continue
        producer.produce(WRITES, value, on_delivery=delivered)
        sent += RECORD_BYTES
    producer.flush(60)
    took = time.perf_counter() - started
    put((len(latencies) * RECORD_BYTES, took, percentile(latencies, 0.5), percentile(latencies, 0.99)))


def replay(address: tuple[str, int], seconds: float, put: Callable[[Any], None]) -> None:
    """Read the history over and over; puts its pid first, and MB/s at the end."""
    consumer = Consumer(address, HISTORY, 0)
    put(os.getpid())
    size, offset, started = 0, 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        following, got = consumer.fetch(offset)
        size += got
        offset = following if following != offset else 0
    put(size / 1e6 / (time.perf_counter() - started))


def spin(cores: float, seconds: float, put: Callable[[Any], None]) -> None:
    """Use so much of a core; puts its pid first, and 0 at the end."""
    put(os.getpid())
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        until = time.process_time() + 0.01 * cores
        while time.process_time() < until:
            pass
        time.sleep(0.01 * max(0.0, 1 - cores))
    put(0.0)


class Measured:
    """The broker with its history."""

    def __init__(self, tidelog: TidelogProcess, args: argparse.Namespace) -> None:
        self._tidelog = tidelog
        self._args = args
        self._consumer_cores = 0.3

    def fill(self) -> None:
        """Write the history, until nothing of it is waiting to be uploaded."""
        create_topic(self._tidelog.bootstrap, HISTORY, 1)
        create_topic(self._tidelog.bootstrap, WRITES, PARTITIONS)
        left = self._args.history_mb << 20
        while left > 0:
            size, _ = in_process(
                replay_produce, ("127.0.0.1", self._tidelog.port), HISTORY, 1, RECORD_BYTES, 1_000_000, 3, 1.0
            )
            left -= size
        time.sleep(3)

    def _produce(self) -> tuple[float, tuple[float, float], float]:
        bootstrap, args = self._tidelog.bootstrap, self._args
        pid = self._tidelog.broker_pid()
        cpu, started = cpu_seconds(pid), time.perf_counter()
        if args.mb_per_s:
            size, took, p50, p99 = in_process(produce_at, bootstrap, args.seconds, args.mb_per_s)
        else:
            size, took = in_process(produce_with_librdkafka, bootstrap, WRITES, RECORD_BYTES, args.seconds, LIBRDKAFKA)
            p50 = p99 = 0.0
        return size / 1e6 / took, (p50, p99), (cpu_seconds(pid) - cpu) / (time.perf_counter() - started)

    def alone(self) -> Run:
        """Nothing beside the producer."""
        speed, latencies, cores = self._produce()
        return Run(speed, latencies, 0.0, 0.0, cores)

    def _beside(self, target: Callable[..., None], first: Any) -> Run:
        with background(target, first, self._args.seconds + 2.5) as result:
            pid = result()
            cpu, started = cpu_seconds(pid), time.perf_counter()
            speed, latencies, cores = self._produce()
            used = (cpu_seconds(pid) - cpu) / (time.perf_counter() - started)
            return Run(speed, latencies, result(), used, cores)

    def with_replay(self) -> Run:
        """A full-history replay beside it."""
        found = self._beside(replay, ("127.0.0.1", self._tidelog.port))
        self._consumer_cores = found.beside_cores
        return found

    def with_spin(self) -> Run:
        """A process that takes as much CPU time as the last replay's client."""
        return self._beside(spin, self._consumer_cores)


def report(name: str, runs: list[Run]) -> float:
    """Print the medians; returns that of the speed."""
    speed = Spread.of(run.mb_per_s for run in runs)
    latency = ""
    if runs[0].latencies_ms[1]:
        p50, p99 = (Spread.of(run.latencies_ms[n] for run in runs) for n in (0, 1))
        latency = f", p50 {p50.median:.1f} ms, p99 {p99.median:.1f} ms"
    replayed = Spread.of(run.replay_mb_per_s for run in runs)
    cores, beside = Spread.of(run.broker_cores for run in runs), Spread.of(run.beside_cores for run in runs)
    print(
        f"{name:11s} {speed.text('MB/s')}{latency}; broker {cores.median:.2f} cores,"
        f" {Spread.of(run.mb_per_s / run.broker_cores for run in runs).text('MB')} produced each CPU s; beside it"
        f" {beside.median:.2f} cores, replay {replayed.text('MB/s')}",
        flush=True,
    )
    return speed.median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history-mb", type=int, default=512 if quick() else 1024)
    parser.add_argument("--seconds", type=float, default=3.0 if quick() else 6.0)
    parser.add_argument("--runs", type=int, default=2 if quick() else 3)
    parser.add_argument("--mb-per-s", type=float, default=0.0)
    parser.add_argument(
        "--bucket", choices=("memory", "disk"), default="disk", help="memory: all that is produced must fit: tens of GB"
    )
    parser.add_argument(
        "--client", choices=("librdkafka", "raw"), default="librdkafka", help="raw: costs next to nothing"
    )
    parser.add_argument("--wal", choices=("disk", "memory"), default="disk")
    parser.add_argument("--dir", help="where the data goes (default: a temporary folder)")
    args = parser.parse_args()
    with (
        directory(args.dir) as data,
        broker(data / "data", SETTINGS, bucket_in_memory=args.bucket == "memory") as tidelog,
    ):
        measured = Measured(tidelog, args)
        measured.fill()
        phases: dict[str, Callable[[], Run]] = {
            "alone": measured.alone,
            "replay": measured.with_replay,
            "spin": measured.with_spin,
        }
        found = interleaved(args.runs, **{name: partial(phase) for name, phase in phases.items()})
        alone, replaying, spinning = (report(name, runs) for name, runs in found.items())
    lost, machine = 1 - replaying / alone, 1 - spinning / alone
    rate = f" at {args.mb_per_s:.0f} MB/s" if args.mb_per_s else ""
    row(
        f"producers{rate} while a full-history replay runs",
        f"{replaying:,.0f} MB/s",
        limit=f"alone {alone:,.0f} MB/s, with a process that takes the replay client's CPU time {spinning:,.0f}",
        ratio=f"lose {lost:.1%}, of which the client's {machine:.1%}",
        goal="lose ≤ 10 %",
        holds=lost <= GOAL,
    )


if __name__ == "__main__":
    main()
