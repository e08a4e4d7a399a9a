"""The cost of a full-history replay for the producers of a real `tidelog up`.

    python -m bench.replay_vs_producers [--history-mb 1024] [--seconds 1.2] [--turns 10] [--mb-per-s 30]

A topic is filled; it is in the bucket except for the part in the log cache (128 MiB). Then librdkafka produces records
of 1 KiB (acks=all) to another topic with a short retention. Two measurements:

- At full speed, for `--turns` turns without a pause. In each turn the producer first runs alone; then a raw consumer
  replays the history repeatedly at full speed; then, after another part alone, a process spins that uses as much CPU
  time as that consumer did (`spin`): its effect is due to the machine, which has two cores for broker, producer and
  consumer, and not to the broker. The loss is relative to the speeds alone directly before and after, because the
  machine's speed varies within a minute. Consumer and spinning process are stopped and continued by signals.
- At a constant rate below the maximum (`--mb-per-s`, 0: none), with latencies, in `--runs` runs of `--run-seconds`
  each.

The bucket is in memory, as if it were on other machines, so that the cores are the bottleneck and not the throughput of
this machine's disk; `--bucket disk` puts it beside the WAL. `--wal memory` removes the disk.
`--set cache.cold_busy_share=1` disables the throttle that yields to producers, to show its effect.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bench._clients import Consumer, create_topic, flush, records_in, replay_produce, send_batch
from bench._common import (
    Spread,
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
    "log.retention_check_interval_ms=300",
    "admin.port=0",
)
KEPT = {"retention.bytes": str(64 << 20), "segment.bytes": str(16 << 20)}
"""Retention of the produced records: the bucket need not hold tens of GB."""
LIBRDKAFKA = {"linger.ms": 5, "batch.size": 1_000_000, "queue.buffering.max.kbytes": 65_536}
GOAL = 0.1
TICK_S = 0.025
"""Interval at which the clients record their progress."""
WARM_S = 2.0


Progress = list[tuple[float, int]]
"""Bytes by time: `time.perf_counter`, which is the same for all processes of this machine."""


class Run(NamedTuple):
    """One run of the producer at a constant rate."""

    mb_per_s: float
    latencies_ms: tuple[float, float]
    """p50 and p99."""
    replay_mb_per_s: float
    broker_cores: float


class Part(NamedTuple):
    """A part of a turn: the process beside the producer, and the duration."""

    beside: str
    """`alone`, `replay` or `spin`."""
    began: float
    ended: float
    client_cores: float
    """CPU time of the process beside it."""
    broker_cores: float


# --- clients, in separate processes ----------------------------------------------------------------------------------


def produce_on(bootstrap: str, seconds: float, put: Callable[[Any], None]) -> None:
    """Produce at full speed. Puts its pid first, and the `Progress` of acknowledged bytes at the end."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", **LIBRDKAFKA})
    producer.list_topics(WRITES, 10)
    before = records_in(bootstrap, WRITES, PARTITIONS)
    put(os.getpid())
    value, sent = os.urandom(RECORD_BYTES), 0
    progress: Progress = [(time.perf_counter(), 0)]
    ends = time.perf_counter() + seconds
    while (now := time.perf_counter()) < ends:
        if now >= progress[-1][0] + TICK_S:
            progress.append((now, (sent - len(producer)) * RECORD_BYTES))
        sent += send_batch(producer, WRITES, value)
    flush(producer)
    records = records_in(bootstrap, WRITES, PARTITIONS) - before
    assert records == sent, f"{records} records are in the log, {sent} were sent"
    put(progress)


def produce_at(bootstrap: str, seconds: float, mb_per_s: float, put: Callable[[Any], None]) -> None:
    """Produce at a constant rate. Puts (bytes acknowledged, start and end time, p50 and p99 in ms)."""
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
    flush(producer)
    ended = time.perf_counter()
    put((len(latencies) * RECORD_BYTES, started, ended, percentile(latencies, 0.5), percentile(latencies, 0.99)))


def replay(address: tuple[str, int], done: Any, put: Callable[[Any], None]) -> None:
    """Read the history repeatedly; puts its pid first, and its `Progress` when `done` is set."""
    consumer = Consumer(address, HISTORY, 0)
    end = consumer.find_end()
    put(os.getpid())
    size = offset = 0
    progress: Progress = [(time.perf_counter(), 0)]
    while not done.is_set():
        following, got = consumer.fetch(offset)
        size += got
        offset = following if following < end else 0
        if (now := time.perf_counter()) >= progress[-1][0] + TICK_S:
            progress.append((now, size))
    put(progress)


def spin(cores: Any, done: Any, put: Callable[[Any], None]) -> None:
    """Use the share of a core in `cores`, which changes; puts its pid first."""
    put(os.getpid())
    while not done.is_set():
        until = time.process_time() + 0.01 * cores.value
        while time.process_time() < until:
            pass
        time.sleep(0.01 * max(0.0, 1 - cores.value))


def speed(progress: Progress, began: float, ended: float) -> float:
    """MB/s between two times."""
    return (_bytes_at(progress, ended) - _bytes_at(progress, began)) / 1e6 / (ended - began)


def _bytes_at(progress: Progress, when: float) -> float:
    after = min(max(bisect.bisect(progress, (when, 0)), 1), len(progress) - 1)
    (t0, b0), (t1, b1) = progress[after - 1], progress[after]
    return b0 + (b1 - b0) * min(max((when - t0) / (t1 - t0), 0.0), 1.0)


# --- the broker and its history --------------------------------------------------------------------------------------


class Measured:
    """The broker with its history, and the stopped replay process."""

    def __init__(self, tidelog: TidelogProcess, args: argparse.Namespace) -> None:
        self._tidelog = tidelog
        self._args = args
        self._done = spawned.Event()

    def fill(self) -> None:
        """Write the history, and wait until all of it is uploaded."""
        create_topic(self._tidelog.bootstrap, HISTORY, 1)
        create_topic(self._tidelog.bootstrap, WRITES, PARTITIONS, KEPT)
        left = self._args.history_mb << 20
        while left > 0:
            size, _ = in_process(
                replay_produce, ("127.0.0.1", self._tidelog.port), HISTORY, 1, RECORD_BYTES, 1_000_000, 3, 1.0
            )
            left -= size
        time.sleep(3)

    @contextlib.contextmanager
    def _beside(self, target: Callable[..., None], first: Any) -> Iterator[tuple[int, Callable[[], Any]]]:
        """Start a stopped process: return its pid, and a function that waits for its result."""
        self._done.clear()
        with background(target, first, self._done) as result:
            pid = result()
            os.kill(pid, signal.SIGSTOP)
            try:
                yield pid, result
            finally:
                os.kill(pid, signal.SIGCONT)
                self._done.set()

    def _part(self, beside: str, pid: int | None) -> Part:
        """Continue the process for `--seconds`; None: only wait."""
        broker_pid = self._tidelog.broker_pid()
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
        used, cpu, began = cpu_seconds(pid) if pid else 0.0, cpu_seconds(broker_pid), time.perf_counter()
        time.sleep(self._args.seconds)
        ended = time.perf_counter()
        took = ended - began
        part = Part(
            beside,
            began,
            ended,
            (cpu_seconds(pid) - used) / took if pid else 0.0,
            (cpu_seconds(broker_pid) - cpu) / took,
        )
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        return part

    def turns(self) -> tuple[list[Part], Progress, Progress]:
        """Return the parts, and the results of producer and replay. The last part is a replay without a producer."""
        cores = spawned.Value("d", 0.05)
        length = (4 * self._args.turns + 1) * (self._args.seconds + 0.05) + WARM_S
        address = "127.0.0.1", self._tidelog.port
        with (
            self._beside(replay, address) as (replaying, replayed),
            self._beside(spin, cores) as (spinning, _),
        ):
            with background(produce_on, self._tidelog.bootstrap, length) as produced:
                produced()
                time.sleep(WARM_S)
                parts = [self._part("alone", None)]
                for _ in range(self._args.turns):
                    parts.append(self._part("replay", replaying))
                    cores.value = max(parts[-1].client_cores, 0.01)
                    parts += [self._part("alone", None), self._part("spin", spinning), self._part("alone", None)]
                acknowledged = produced()
            settle(self._tidelog.broker_pid())
            parts.append(self._part("replay alone", replaying))
            os.kill(replaying, signal.SIGCONT)
            self._done.set()
            return parts, acknowledged, replayed()

    def held(self, mb_per_s: float, *, beside: bool) -> Run:
        """One run at a rate, alone or beside a replay."""
        with self._beside(replay, ("127.0.0.1", self._tidelog.port)) as (pid, replayed):
            broker_pid = self._tidelog.broker_pid()
            if beside:
                os.kill(pid, signal.SIGCONT)
            cpu, before = cpu_seconds(broker_pid), time.perf_counter()
            size, began, ended, p50, p99 = in_process(
                produce_at, self._tidelog.bootstrap, self._args.run_seconds, mb_per_s
            )
            cores = (cpu_seconds(broker_pid) - cpu) / (time.perf_counter() - before)
            os.kill(pid, signal.SIGCONT)
            self._done.set()
            beside_it = speed(replayed(), began, ended) if beside else 0.0
        return Run(size / 1e6 / (ended - began), (p50, p99), beside_it, cores)


# --- figures ---------------------------------------------------------------------------------------------------------


def lost_beside(parts: list[Part], progress: Progress, beside: str) -> Spread:
    """The producer's losses beside that process, relative to its mean speed in the parts before and after."""
    speeds = [speed(progress, part.began, part.ended) for part in parts]
    return Spread.of(
        1 - speeds[number] / ((speeds[number - 1] + speeds[number + 1]) / 2)
        for number, part in enumerate(parts)
        if part.beside == beside
    )


def share(spread: Spread) -> str:
    """Format a share as a percentage."""
    return f"{spread.median:.1%} ({spread.low:.1%} to {spread.high:.1%})"


def full_speed(measured: Measured) -> None:
    """Print the losses of producers at full speed."""
    parts, acknowledged, replayed = measured.turns()
    held_back = parts.pop()
    produced, read = {}, {}
    for beside in ("alone", "replay", "spin"):
        chosen = [part for part in parts if part.beside == beside]
        produced[beside] = Spread.of(speed(acknowledged, part.began, part.ended) for part in chosen)
        read[beside] = Spread.of(speed(replayed, part.began, part.ended) for part in chosen)
        broker, client = (
            Spread.of(part.broker_cores for part in chosen),
            Spread.of(part.client_cores for part in chosen),
        )
        print(
            f"{beside:7s} {produced[beside].text('MB/s')}; broker {broker.median:.2f} cores; beside it"
            f" {client.median:.2f} cores, replay {read[beside].text('MB/s')}",
            flush=True,
        )
    unbound = speed(replayed, held_back.began, held_back.ended)
    lost, spinning = lost_beside(parts, acknowledged, "replay"), lost_beside(parts, acknowledged, "spin")
    print(f"producers lose {share(lost)} to the replay, {share(spinning)} to its client's CPU time", flush=True)
    row(
        "producers while a full-history replay runs",
        f"{produced['replay'].median:,.0f} MB/s",
        limit=f"alone {produced['alone'].median:,.0f} MB/s",
        ratio=f"lose {lost.median:.1%}, of which the replay client's CPU time takes {spinning.median:.1%}",
        goal="lose ≤ 10 %",
        holds=lost.median <= GOAL,
    )
    row(
        "the replay beside those producers",
        f"{read['replay'].text('MB/s')}",
        limit=f"without producers {unbound:,.0f} MB/s",
    )


def held(measured: Measured, mb_per_s: float, runs: int) -> None:
    """Print the losses of producers at a constant rate."""
    found: dict[bool, list[Run]] = {False: [], True: []}
    for _ in range(runs):
        for beside, made in found.items():
            made.append(measured.held(mb_per_s, beside=beside))
    speeds = {}
    for beside, made in found.items():
        speeds[beside] = Spread.of(run.mb_per_s for run in made)
        p50, p99 = (Spread.of(run.latencies_ms[n] for run in made) for n in (0, 1))
        print(
            f"{'replay' if beside else 'alone':7s} {speeds[beside].text('MB/s')}, p50 {p50.median:.1f} ms, p99"
            f" {p99.median:.1f} ms; broker {Spread.of(run.broker_cores for run in made).median:.2f} cores, replay"
            f" {Spread.of(run.replay_mb_per_s for run in made).text('MB/s')}",
            flush=True,
        )
    lost = 1 - speeds[True].median / speeds[False].median
    row(
        f"producers at {mb_per_s:.0f} MB/s while a full-history replay runs",
        f"{speeds[True].median:,.0f} MB/s",
        limit=f"alone {speeds[False].median:,.0f} MB/s",
        ratio=f"lose {lost:.1%}",
        goal="lose ≤ 10 %",
        holds=lost <= GOAL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history-mb", type=int, default=512 if quick() else 1024)
    parser.add_argument("--seconds", type=float, default=1.2, help="of each part of a turn")
    parser.add_argument("--turns", type=int, default=3 if quick() else 10)
    parser.add_argument("--mb-per-s", type=float, default=30.0, help="the rate of the second part; 0: none")
    parser.add_argument("--run-seconds", type=float, default=3.0 if quick() else 5.0, help="of each run at that rate")
    parser.add_argument("--runs", type=int, default=2 if quick() else 3, help="at that rate")
    parser.add_argument("--bucket", choices=("memory", "disk"), default="memory")
    parser.add_argument("--wal", choices=("disk", "memory"), default="disk")
    parser.add_argument(
        "--set", action="append", default=[], help="a setting of the broker, such as cache.cold_busy_share=1"
    )
    parser.add_argument("--dir", help="where the data goes (default: a temporary folder)")
    args = parser.parse_args()
    settings = (*SETTINGS, f"wal.kind={args.wal}", *args.set)
    with (
        directory(args.dir) as data,
        broker(data / "data", settings, bucket_in_memory=args.bucket == "memory") as tidelog,
    ):
        measured = Measured(tidelog, args)
        measured.fill()
        full_speed(measured)
        if args.mb_per_s:
            held(measured, args.mb_per_s, args.runs)


if __name__ == "__main__":
    main()
