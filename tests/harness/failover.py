"""A broker with its WAL in the bucket dies under load, again and again; then every promise is checked.

`tidelog up --brokers 3 --wal s3` and one idempotent producer over many partitions. In each round the partitions are
spread evenly, one broker is killed (`kill -9`), or in every fourth round paused until others have taken over and then
woken up (SIGSTOP, SIGCONT): a zombie with everything in memory that it had. Its controller goes with it. Measured:

- `declared`: from the signal until a salvager was elected in its place;
- `writable`: from then until the last of its partitions had acknowledged a record again, seen by the producer;
- the salvage's own steps.

At the end: no produce error, every acknowledged record at its offset, none twice, all in order. A zombie's
acknowledgement would be an offset that holds something else.

    python -m tests.harness.failover --rounds 50 [--partitions 24] [--endpoint URL --access-key K --secret-key S]

Without an endpoint the bucket is a directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import TidelogError
from tests.e2e.backends import create_topic
from tests.support.cluster_process import UpCluster, eventually, up_cluster
from tests.support.partition_load import PartitionLoad
from tests.support.s3_servers import new_bucket
from tidelog.client import Cluster

TOPIC = "load"
BROKERS = 3
PAUSE_EVERY = 4


@dataclass
class Round:
    """What one death came to."""

    kind: str
    broker: int
    partitions: int
    declared_s: float
    writable_s: float
    steps_ms: dict[str, float] = field(default_factory=dict)


def ask(bootstrap: str, path: str, holds: Callable[[Any], Any], spare: str = "", timeout_s: float = 90.0) -> Any:
    """What any broker (but `spare`) answers, once it holds."""

    def once() -> Any:
        for address in bootstrap.split(","):
            if address != spare:
                with contextlib.suppress(TidelogError):
                    found = Cluster(address).get(path)
                    if holds(found):
                        return found
        return None

    return eventually(once, timeout_s)


def placed(bootstrap: str) -> dict[int, int | None]:
    """The leader of each partition."""
    rows = ask(bootstrap, f"/partitions?topic={TOPIC}", lambda answer: answer["partitions"])["partitions"]
    return {row["partition"]: row["leader"] for row in rows}


def spread(bootstrap: str, partitions: int) -> None:
    """Every broker ready, and partition p on broker p mod 3 + 1."""
    ask(bootstrap, "/status", lambda found: sum(node["state"] != "dead" for node in found["nodes"]) == BROKERS)
    wanted = {index: index % BROKERS + 1 for index in range(partitions)}

    def moved() -> bool:
        found = placed(bootstrap)
        moves = [{"topic": TOPIC, "partition": at, "to": to} for at, to in wanted.items() if found[at] != to]
        if moves:
            with contextlib.suppress(TidelogError):
                Cluster(bootstrap).post("/moves", {"moves": moves})
        return not moves

    eventually(moved, 120)


def one_round(up: UpCluster, load: PartitionLoad, number: int, partitions: int) -> Round:
    """One broker dies; returns when all is as it was."""
    bootstrap, broker = up.bootstrap, number % BROKERS + 1
    spread(bootstrap, partitions)
    load.wait_grown()
    node = next(row for row in Cluster(bootstrap).get("/status")["nodes"] if row["id"] == broker)
    host = next(address for address in bootstrap.split(",") if address == node["address"])
    pid = next(row["pid"] for row in Cluster(host).get("/status")["nodes"] if row["id"] == broker)
    pauses = number % PAUSE_EVERY == PAUSE_EVERY - 1
    died_ms = int(time.time() * 1000)
    load.begin_round()
    os.kill(pid, signal.SIGSTOP if pauses else signal.SIGKILL)

    def done(found: Any) -> list[Any]:
        salvaged: list[Any] = found["failover"]["salvaged"]
        return [one for one in salvaged if one["broker"] == broker and one["since_ms"] >= died_ms]

    salvage = done(ask(bootstrap, "/status", done, spare=host))[-1]
    if pauses:
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: pid not in up.node_pids(), 90)
    load.wait_grown()
    gaps = load.gaps_s()
    longest_s = max(gap for at, gap in gaps.items() if at % BROKERS + 1 == broker)
    declared_s = (salvage["since_ms"] - died_ms) / 1000
    kind = "pause" if pauses else "kill"
    writable_s = max(0.0, longest_s - declared_s)
    return Round(kind, broker, salvage["partitions_placed"], declared_s, writable_s, salvage["steps_ms"])


def percentiles(values: list[float]) -> str:
    """Median, 99th percentile (the next value above) and largest."""
    if not values:
        return "-"
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]
    return f"p50 {at[0]:.2f} s   p99 {at[1]:.2f} s   max {ordered[-1]:.2f} s"


def run(arguments: argparse.Namespace, directory: Path) -> list[str]:
    """All rounds; what was wrong."""
    flags = ["--wal", "s3", "--set", f"controller.session_timeout_ms={arguments.session_timeout_ms}"]
    if arguments.endpoint:
        flags += ["--s3-endpoint", arguments.endpoint, "--bucket", new_bucket()]
        flags += ["--set", f"s3.access_key_id={arguments.access_key}"]
        flags += ["--set", f"s3.secret_access_key={arguments.secret_key}"]
    rounds: list[Round] = []
    with up_cluster(directory / "data", BROKERS, flags) as up:
        create_topic(up.bootstrap, TOPIC, arguments.partitions)
        with PartitionLoad(up.bootstrap, TOPIC, arguments.partitions) as load:
            for number in range(arguments.rounds):
                one = one_round(up, load, number, arguments.partitions)
                rounds.append(one)
                print(
                    f"{number + 1:3} {one.kind:5} broker {one.broker}: {one.partitions} partitions, "
                    f"declared after {one.declared_s:.2f} s, writable {one.writable_s:.2f} s later "
                    f"{json.dumps(one.steps_ms)}",
                    flush=True,
                )
        problems = load.verify(up.bootstrap)
        count = load.count()
    print(f"\n{len(rounds)} rounds, {count:,} records acknowledged, {arguments.partitions} partitions")
    for kind in ("kill", "pause"):
        mine = [one for one in rounds if one.kind == kind]
        print(f"{kind:5} declared  {percentiles([one.declared_s for one in mine])}")
        print(f"{kind:5} writable  {percentiles([one.writable_s for one in mine])}")
    return problems


def main() -> int:
    """Run; exit code 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--partitions", type=int, default=24)
    parser.add_argument("--session-timeout-ms", type=int, default=10_000)
    parser.add_argument("--endpoint", default="", help="of an S3 server; its bucket is made")
    parser.add_argument("--access-key", default="")
    parser.add_argument("--secret-key", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidelog-failover-") as directory:
        problems = run(arguments, Path(directory))
    print("\n".join(problems) if problems else "nothing lost, doubled or reordered; no produce error")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
