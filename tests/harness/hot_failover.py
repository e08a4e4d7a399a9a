"""Masters of replicated WALs are killed (`kill -9`) under load, again and again; then every promise is checked.

Controllers and brokers in a process each, three replicas of each WAL, a write quorum of two, one idempotent producer
over many partitions. In each round all replicas are in sync, each broker leads its own replica set, and one broker is
killed. Measured in seconds, from the kill on:

- `first`: until the first of its partitions had a record acknowledged that was sent when the master was dead;
- `last`: until the last of them had one;
- `others`: the longest time that a partition of another broker waited: what the death costs those that it does not
  concern, or the machine's load;
- `quiet`: the longest time that any partition waited in the 2 s right before the kill: what the load, the producer and
  the machine do by themselves;
- `back`: until the broker that was started again leads its replica set again, with everything (it is elected at once;
  by itself that happens after 30 s); `took` is the whole round.

The producers send a record to each partition every `--pause-ms`, evenly over that time: so much of `last` may be the
time until the partition has something to send, and `others` and `quiet` are at least as long. At the end:
no produce error, every acknowledged record at its offset, none twice, all in order. `make hot-failover`:

    python -m tests.harness.hot_failover --rounds 20 --partitions 100
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from tests.e2e.backends import create_topic
from tests.harness.failover import percentiles
from tests.support.hot_cluster import BROKERS, HotCluster, hot_cluster
from tests.support.partition_load import PartitionLoad

TOPIC = "load"
HEADER = "round broker partitions   first    last  others   quiet    back    took  load"
QUIET_S = 2.0


@dataclass(frozen=True)
class HotRound:
    """What one death came to; seconds."""

    broker: int
    partitions: int
    first_s: float
    last_s: float
    others_s: float
    quiet_s: float
    back_s: float
    took_s: float

    def line(self, number: int) -> str:
        """For the table."""
        return (
            f"{number:5} {self.broker:6} {self.partitions:10} {self.first_s:7.2f} {self.last_s:7.2f} "
            f"{self.others_s:7.2f} {self.quiet_s:7.2f} {self.back_s:7.2f} {self.took_s:7.2f} {os.getloadavg()[0]:5.1f}"
        )


def said_since(hot: HotCluster, starts: Mapping[int, int]) -> str:
    """What each node has said from these lines on."""
    return "\n".join(f"--- node {node}\n" + "\n".join(hot.nodes[node].output[at:]) for node, at in starts.items())


def one_round(hot: HotCluster, load: PartitionLoad, number: int, timeout_s: float) -> HotRound:
    """Kill a master; returns when it leads again. Raises `AssertionError` when something is not in time."""
    began_s = time.monotonic()
    broker = BROKERS[number % len(BROKERS)]
    hot.wait_full(timeout_s=timeout_s)
    for replica_set, row in hot.sets().items():
        if row["master"] != replica_set:
            hot.elect(replica_set, replica_set)
    load.wait_grown(10, timeout_s)
    rows = hot.ask(f"/partitions?topic={TOPIC}")["partitions"]
    mine = {row["partition"] for row in rows if row["leader"] == broker}
    assert mine, f"broker {broker} leads nothing"
    load.begin_round()
    time.sleep(QUIET_S)
    quiet_s = max(load.gaps_s().values())
    load.begin_round()
    killed_s = time.monotonic()
    hot.kill(broker)
    load.mark()
    hot.wait_masters([broker], timeout_s)
    load.wait_grown(10, timeout_s)
    gaps, waited = load.gaps_s(), load.acknowledged_s(killed_s)
    hot.begin(broker)
    hot.ready(broker)
    hot.wait_full(timeout_s=timeout_s)
    hot.elect(broker, broker)
    back_s = time.monotonic() - killed_s
    return HotRound(
        broker,
        len(mine),
        min(waited[at] for at in mine),
        max(waited[at] for at in mine),
        max((gap for at, gap in gaps.items() if at not in mine), default=0.0),
        quiet_s,
        back_s,
        time.monotonic() - began_s,
    )


def run(arguments: argparse.Namespace, directory: Path) -> list[str]:
    """All rounds; what was wrong."""
    rounds: list[HotRound] = []
    problems: list[str] = []
    with hot_cluster(directory / "cluster", controllers=arguments.controllers) as hot:
        create_topic(hot.bootstrap, TOPIC, arguments.partitions)
        print(HEADER, flush=True)
        load = PartitionLoad(
            hot.bootstrap, TOPIC, arguments.partitions, pause_s=arguments.pause_ms / 1000, producers=arguments.producers
        )
        with load:
            for number in range(arguments.rounds):
                try:
                    starts = {node: len(hot.nodes[node].output) for node in hot.nodes}
                    one = one_round(hot, load, number, arguments.round_timeout_s)
                except AssertionError as error:
                    problems.append(f"round {number + 1} did not end: {error}")
                    for node in hot.nodes:
                        print(f"--- node {node}\n{hot.said(node)}", flush=True)
                    break
                rounds.append(one)
                print(one.line(number + 1), flush=True)
                if one.last_s > arguments.tell_slower_s:
                    print(said_since(hot, starts), flush=True)
        problems += load.verify(hot.bootstrap)
    print(f"\n{len(rounds)} rounds, {load.count():,} records acknowledged, {arguments.partitions} partitions")
    print(f"{os.cpu_count()} cores, load average at the end {os.getloadavg()[0]:.1f}")
    for name in ("first", "last", "others", "quiet", "back"):
        print(f"{name:6}  {percentiles([getattr(one, f'{name}_s') for one in rounds])}")
    return problems


def main() -> int:
    """Run; exit code 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--controllers", type=int, default=3)
    parser.add_argument("--pause-ms", type=float, default=50.0, help="between two records of a partition")
    parser.add_argument("--producers", type=int, default=1, help="among which the partitions are divided")
    parser.add_argument("--round-timeout-s", type=float, default=90.0)
    parser.add_argument(
        "--tell-slower-s", type=float, default=inf, help="print the logs of a round whose `last` is more"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # and end the nodes
    gc.disable()  # millions of noted records: to look through them stops the producer for longer and longer
    with tempfile.TemporaryDirectory(prefix="tidelog-hot-failover-") as directory:
        problems = run(arguments, Path(directory))
    print(json.dumps(problems, indent=1) if problems else "nothing lost, doubled or reordered; no produce error")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
