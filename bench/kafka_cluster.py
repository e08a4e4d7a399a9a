"""Three brokers of Tidelog beside three brokers of Apache Kafka, in turns, on this machine; then a leader is killed.

    python -m bench.kafka_cluster [--rounds 2] [--seconds 3] [--clusters tidelog,kafka,kafka-synced] [--dir DIR]
                                  [--mb-per-s 5] [--batch-bytes 16384] [--paused] [--set section.key=value]

Each round starts every cluster once, on empty directories, a controller and three brokers with three replicas of
everything, of which two must have a record, and measures with the same clients (`bench._cluster_load`):

- librdkafka's producer: 1 KiB records, 6 partitions, acks=all, after a warm-up;
- acknowledgements of 16 KiB requests at 5 MB/s, one raw socket to a leader (p50, p99), which sends without waiting for
  answers. Kafka works on one request of a connection at a time, so one that waits for replicas holds up those behind
  it; where it cannot answer as many as are sent, the latencies are those of a queue, and grow with `--seconds`. The row
  says so then, and has no verdict. A producer would put more into each request instead;
- the time from the `kill -9` of a leader until the first and the last of its partitions had an acknowledgement, for
  producers with librdkafka's default settings and with back-offs of 10 ms. Kafka finds the death by its session
  time-out (9 s); Tidelog by the end of the broker's connections. With `--paused` the
  leader is stopped (SIGSTOP) instead, as a host that falls silent: then Tidelog waits for a session time-out, too, its
  own of 10 s.

`tidelog` has its WALs and its embedded store on the disk, and syncs a record on two brokers before it acknowledges.
`kafka` acknowledges from the page caches, as it does by default; `kafka-synced` has `log.flush.interval.messages=1` and
syncs, too. Kafka acknowledges when every replica in sync has a record, Tidelog when two of three have it.

All brokers and the client share the machine's cores and its disk, nothing is pinned. Four JVMs take 3.3 GiB of heap.
Kafka comes from Maven (`localstack/install.py kafka`). Before each cluster the file system is synced and, where that is
allowed, the page cache is emptied. The rows compare medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench._cluster_load import Failover, LatencyLoad, failover, latencies, throughput
from bench._clusters import Cluster, KafkaCluster, TidelogCluster, running
from bench._common import ANSWERED, KEEPS_UP, answered_share, directory, percentile, quick, row
from bench._peers import installed
from bench.peers import fresh_page_cache

NAMES = ("tidelog", "kafka", "kafka-synced")
Figures = dict[str, float]
RATE, P50, P99 = "librdkafka to 6 partitions, MB/s", "acknowledged, p50, ms", "acknowledged, p99, ms"
FIRST = "leader gone, first partition acknowledged, defaults, s"
GOALS: tuple[tuple[str, str, float], ...] = (
    # measure, cluster, the largest ratio that reaches the goal
    (P50, "kafka-synced", 1.0),
    (P99, "kafka-synced", 1.0),
    (FIRST, "kafka", 0.2),
    (FIRST, "kafka-synced", 0.2),
)


def clusters(wanted: Sequence[str], settings: Sequence[str]) -> dict[str, Callable[[Path], Cluster]]:
    """Return how to make each wanted cluster that can be had on this machine."""
    found: dict[str, Callable[[Path], Cluster]] = {}
    if "tidelog" in wanted:
        found["tidelog"] = lambda path: TidelogCluster(path, 3, settings)
    if any(name.startswith("kafka") for name in wanted) and (jars := installed("kafka")) is not None:
        if "kafka" in wanted:
            found["kafka"] = lambda path: KafkaCluster(path, jars)
        if "kafka-synced" in wanted:
            found["kafka-synced"] = lambda path: KafkaCluster(path, jars, "log.flush.interval.messages=1")
    return found


def measure(made: Cluster, load: LatencyLoad, number: signal.Signals) -> Figures:
    """All figures of one cluster, once."""
    fresh_page_cache()
    with running(made) as cluster:
        produced = throughput(cluster, load.seconds)
        took = latencies(cluster, load)
        found = {RATE: produced.mb_per_s, "brokers' CPU of a GB, s": produced.cpu_s_per_gb}
        found |= {P50: percentile(took, 0.5) * 1e3, P99: percentile(took, 0.99) * 1e3}
        found[ANSWERED] = answered_share(took, load.seconds)
        return found | gone(failover(cluster, number))


def gone(seen: dict[str, Failover]) -> Figures:
    """The figures of a leader's death, by the names of the rows."""
    return {
        f"leader gone, {which} partition acknowledged, {name}, s": took
        for name, each in seen.items()
        for which, took in (("first", each.first_s), ("last", each.last_s))
    }


def report(of: dict[str, list[Figures]]) -> None:
    """Print a row for each measure and cluster of Kafka."""
    medians = {
        name: {key: statistics.median(one[key] for one in runs if key in one) for key in runs[0]}
        for name, runs in of.items()
        if runs
    }
    ours = medians.pop("tidelog", {})
    goals = {(measure, name): goal for measure, name, goal in GOALS}
    for key, figure in ours.items():
        for name, theirs in medians.items():
            if key not in theirs:
                continue
            ratio, goal = figure / theirs[key], goals.get((key, name))
            is_queue = key in (P50, P99) and theirs.get(ANSWERED, 1.0) < KEEPS_UP
            row(
                f"{key}, beside {name}",
                f"{figure:.4g}",
                limit=f"{theirs[key]:.4g}{', which does not keep up' if is_queue else ''}",
                ratio=f"{ratio:.2f}",
                goal="" if goal is None else f"≤ {goal:g}",
                holds=None if goal is None or is_queue else ratio <= goal,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 if quick() else 2)
    parser.add_argument("--seconds", type=float, default=1.0 if quick() else 3.0)
    parser.add_argument("--mb-per-s", type=float, default=5.0)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--clusters", default=",".join(NAMES))
    parser.add_argument("--paused", action="store_true", help="stop the leader (SIGSTOP) instead of killing it")
    parser.add_argument("--dir", default=None, help="where the brokers write")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="of Tidelog")
    args = parser.parse_args()
    wanted = args.clusters.split(",")
    if unknown := set(wanted) - set(NAMES):
        parser.error(f"no cluster {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    makers = clusters(wanted, args.set)
    load = LatencyLoad(args.batch_bytes, args.mb_per_s, args.seconds)
    number = signal.SIGSTOP if args.paused else signal.SIGKILL
    of: dict[str, list[Figures]] = {name: [] for name in makers}
    with directory(args.dir) as path:
        for turn in range(args.rounds):
            for name, make in makers.items():
                place = path / f"{name}-{turn}"
                figures = measure(make(place), load, number)
                shutil.rmtree(place)
                of[name].append(figures)
                text = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                print(f"  {name:12s} {text}; load {os.getloadavg()[0]:.1f}", flush=True)
    report(of)
    return 0 if len(makers) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
