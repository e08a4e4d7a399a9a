"""`tidelog cluster restart --rolling` under load, again and again; then every promise is checked.

`tidelog up --brokers 3`: controllers and brokers in three processes, three replicas of each WAL, a write quorum of two,
one idempotent producer over many partitions, and a consumer group, all with librdkafka's default settings. Each run
restarts all brokers. Each partition is handed over twice: away from its broker, and back to it. So its *summed stall*
is the sum of the two longest times between two acknowledgements, less the usual time between two
(`--pause-ms` + 5 ms of `linger.ms`). `quiet` is the same of as long a time before the run, without a restart: what
the load and the machine do by themselves. `took` is the run.

At the end: no produce error, every acknowledged record at its offset, none twice, all in order; the group was told of
no error and has read all of it. `make rolling-restart`:

    python -m tests.harness.rolling_restart --runs 5 --partitions 30
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.e2e.backends import create_topic
from tests.harness.failover import percentiles
from tests.support.cli import environment
from tests.support.default_group import DefaultGroup
from tests.support.partition_load import PartitionLoad
from tests.support.tidelog_process import TidelogProcess
from tidelog.chaos.serve_cluster import eventually, tidelog_json

TOPIC = "load"
LINGER_MS = 5.0
QUIET_S = 20.0


def spread(bootstrap: str) -> None:
    """Wait until every replica set is led by its own broker, with all members in sync."""

    def calm() -> Any:
        rows = tidelog_json(bootstrap, "replica-set", "list")
        return rows and all(row["master"] == row["id"] and len(row["in_sync"]) == len(rows) for row in rows)

    eventually(calm, 60.0)


def restart(bootstrap: str, *flags: str, timeout_s: float = 180.0) -> list[dict[str, Any]]:
    """Run the command; return what it says of each broker. Raises `AssertionError` when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", "cluster", "restart", "--rolling", "--format", "json", *flags],
        capture_output=True,
        text=True,
        env=environment(bootstrap),
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    found: list[dict[str, Any]] = json.loads(done.stdout)["restarted"]
    return found


def run(arguments: argparse.Namespace, directory: Path) -> list[str]:
    """All runs; what was wrong."""
    process = TidelogProcess(directory / "data", ["--brokers", "3"])
    process.start()
    stalls: list[float] = []
    try:
        bootstrap = process.bootstrap
        create_topic(bootstrap, TOPIC, arguments.partitions)
        spread(bootstrap)
        load = PartitionLoad(
            bootstrap, TOPIC, arguments.partitions, pause_s=arguments.pause_ms / 1000, defaults=not arguments.eager
        )
        usual_s = (arguments.pause_ms + LINGER_MS) / 1000
        with DefaultGroup(bootstrap, TOPIC, arguments.partitions) as group:
            print("run     p50     p99     max  longest  quiet: p50     max    took  load  seconds of each broker")
            with load:
                for number in range(arguments.runs):
                    stalls += _one_run(bootstrap, load, number, usual_s)
            group.wait_read(load.ends())
        problems = load.verify(bootstrap) + group.problems[:20]
        print(f"\n{arguments.runs} runs, {load.count():,} records acknowledged, {arguments.partitions} partitions")
        print(f"{os.cpu_count()} cores, load average at the end {os.getloadavg()[0]:.1f}")
        print(f"summed stall of a partition in a run  {percentiles(stalls)}")
        print(f"the group was given {group.again} records again")
        if problems or arguments.verbose:
            print(process.tail(200))
        return problems
    except BaseException:
        print(process.tail(200))
        raise
    finally:
        process.stop()


def _stalls(load: PartitionLoad, usual_s: float) -> list[float]:
    return sorted(max(0.0, each - 2 * usual_s) for each in load.two_longest_gaps_s().values())


def _one_run(bootstrap: str, load: PartitionLoad, number: int, usual_s: float) -> list[float]:
    """Restart all brokers once; the summed stall of each partition."""
    load.wait_grown(20)
    load.begin_round()
    time.sleep(QUIET_S)  # to measure the load without a restart
    quiet = _stalls(load, usual_s)
    load.begin_round()
    began_s = time.monotonic()
    brokers = restart(bootstrap)
    took_s = time.monotonic() - began_s
    load.wait_grown(10)
    stalls, longest = _stalls(load, usual_s), max(load.gaps_s().values())
    at = [stalls[min(len(stalls) - 1, int(share * len(stalls)))] for share in (0.5, 0.99)]
    each = " ".join(f"{one['broker']}: {one['took_s']:.1f}" for one in brokers)
    print(
        f"{number + 1:3} {at[0]:7.2f} {at[1]:7.2f} {stalls[-1]:7.2f} {longest:8.2f} {quiet[len(quiet) // 2]:11.2f} "
        f"{quiet[-1]:7.2f} {took_s:7.1f} {os.getloadavg()[0]:5.1f}  {each}",
        flush=True,
    )
    return stalls


def main() -> int:
    """Run; exit code 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=30)
    parser.add_argument("--pause-ms", type=float, default=20.0, help="between two records of a partition")
    parser.add_argument("--eager", action="store_true", help="a producer that retries after 10 ms: the cluster's part")
    parser.add_argument("--verbose", action="store_true", help="what the cluster said")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # and end the cluster
    gc.disable()  # each record is noted: to look through them stops producer and consumers for longer with each run
    with tempfile.TemporaryDirectory(prefix="tidelog-rolling-restart-") as directory:
        problems = run(arguments, Path(directory))
    print(json.dumps(problems, indent=1) if problems else "nothing lost, doubled or reordered; no error was told")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
