"""Scaling from 3 brokers to 6 and back to 3 under load: time to balance, and the effect on clients.

    python -m bench.scaling [--partitions 1000] [--watched 100] [--mb-per-s 2] [--replicas 3]

Three brokers and three controllers as processes, a topic of `--partitions`, idempotent confluent-kafka producers at a
constant rate and consumers that read all (`bench._move_clients`, back-off 10 ms). `--watched` partitions get three
quarters of the load, so that a stall is longer than the time between two records; the others get the rest. Then three
more brokers are started and the balancer is run; when it is done, the three are drained together.

Measured in each direction: seconds to balance (from the command to the last opening, including new plans after a plan
was voided, for example by a broker declared dead; the start of the processes is printed separately); the time for which
each moved partition was closed (source's close to target's opening) and the sum; the stall of the watched ones (longest
gap between two acknowledgements that overlaps their move); the bytes uploaded while partitions were closed, and all
bytes sent to the bucket; the CPU time of all nodes, which is independent of other load on the machine. The run fails if
a record is lost, duplicated or out of order.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench._common import percentile, quick, row
from bench._move_clients import Job
from bench.partition_moves import AFTER_S, Client, Span, line, longest_gap_ms, spans_of
from tests.e2e.backends import create_topic
from tests.support.cluster_process import UpCluster, up_cluster
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.process import up_control

TOPIC = "scaled"
GOAL_S = 10.0
STEADY_S = 4.0
"""Wait after brokers were added, for their first load reports."""
WATCHED_SHARE = 0.75
EVEN_SHARE = 0.25
"""Share of a broker's mean number of partitions: the difference between maximum and minimum that
`balancer.partitions_threshold_percent` allows, and what the goal for bytes may add."""


class Phase(NamedTuple):
    """One direction."""

    name: str
    seconds: float
    moved: int
    spans: list[Span]
    sent_bytes: int
    cpu_s: float
    """CPU time of all brokers and controllers, independent of other load on the machine."""
    counts: Counter[int]


def owners(cluster: ClusterConnection) -> list[int]:
    """The broker of each partition, by index."""
    return [each["broker"] for each in cluster.get(f"/partitions?topic={TOPIC}")["partitions"]]


def sent_bytes(cluster: ClusterConnection) -> int:
    """Bytes sent to the bucket so far, by all brokers."""
    urls = [node["admin_url"] for node in cluster.get("/status")["nodes"] if node["admin_url"]]
    usages = [http_json(url, "/bucket/usage")["purposes"].values() for url in urls]
    return sum(int(purpose["sent_bytes"]) for usage in usages for purpose in usage)


def is_even(cluster: ClusterConnection) -> bool:
    """Whether the brokers with partitions have about the same number."""
    counts = Counter(owners(cluster)).values()
    return max(counts) - min(counts) <= EVEN_SHARE * sum(counts) / len(counts)


def is_still(cluster: ClusterConnection) -> bool:
    """Whether no moves are running or to be issued."""
    found = cluster.get("/balancer")
    return not found["left"] and not found["in_flight"]


def cpu_s(up: UpCluster) -> float:
    """CPU time of all nodes so far, in seconds."""
    ticks = 0
    for pid in up.node_pids():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def phase(
    name: str, up: UpCluster, cluster: ClusterConnection, begin: Callable[[], Any], is_done: Callable[[], bool]
) -> Phase:
    """Start moves of partitions, and wait until they are done."""
    before, sent, cpu, start = owners(cluster), sent_bytes(cluster), cpu_s(up), time.monotonic()
    begin()
    while not is_done():
        assert time.monotonic() < start + 300, "it is not balanced after five minutes"
        time.sleep(0.05)
    seconds = time.monotonic() - start
    cpu = cpu_s(up) - cpu
    time.sleep(1.0)
    after = owners(cluster)
    spans = [one for one in spans_of(cluster, TOPIC) if one.closed >= start - 0.01]
    seconds = max([seconds, *(one.opened - start for one in spans)])
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    return Phase(name, seconds, moved, spans, sent_bytes(cluster) - sent, cpu, Counter(after))


def grow(up: UpCluster, cluster: ClusterConnection, directory: Path) -> tuple[Phase, list[int]]:
    """Add three brokers."""
    start = time.monotonic()
    added = [up_control.ask(directory, {"do": "add"})["id"] for _ in range(3)]
    started_s, plans = time.monotonic() - start, 1
    time.sleep(STEADY_S)

    def is_done() -> bool:
        nonlocal plans
        if not is_still(cluster):
            return False
        if is_even(cluster):
            return True
        plans += 1
        cluster.post("/balancer/run")
        return False

    found = phase("3 → 6", up, cluster, lambda: cluster.post("/balancer/run"), is_done)
    print(f"three processes more were ready after {started_s:.1f} s (not in the time to balance); plans made: {plans}")
    return found, added


def shrink(up: UpCluster, cluster: ClusterConnection, leaving: list[int]) -> Phase:
    """Drain and remove them."""

    def begin() -> None:
        for each in leaving:
            cluster.post(f"/brokers/drain?id={each}")

    def is_done() -> bool:
        rows = {each["id"]: each for each in cluster.get("/brokers")["brokers"]}
        return all(not rows[each]["partitions"] for each in leaving) and is_still(cluster)

    return phase("6 → 3", up, cluster, begin, is_done)


def start_clients(up: UpCluster, directory: Path, options: argparse.Namespace) -> list[Client]:
    """Start consumers first; for the watched partitions, then for the others."""
    parts = [
        (list(range(options.watched)), WATCHED_SHARE),
        (list(range(options.watched, options.partitions)), 1 - WATCHED_SHARE),
    ]
    return [
        Client(
            Job(
                role=role,
                client="confluent",
                bootstrap=up.bootstrap,
                topic=TOPIC,
                partitions=partitions,
                rate_bytes=options.mb_per_s * 1e6 * share,
                record_bytes=options.record_bytes,
                back_off_ms=10,
                out=str(directory / f"{role}-{share}.json"),
            )
        )
        for partitions, share in parts
        if partitions
        for role in ("consume", "produce")
    ]


def stop_clients(clients: list[Client]) -> dict[int, list[float]]:
    """Return the times of acknowledgements by partition. Checks that everything was read once, in order."""
    acked = {key: times for one in clients if one.job.role == "produce" for key, times in one.stop().items()}
    read = {key: times for one in clients if one.job.role == "consume" for key, times in one.stop().items()}
    for partition, times in acked.items():
        assert len(read[partition]) == len(times), (
            f"{partition}: {len(times)} acknowledged, {len(read[partition])} read"
        )
    return acked


def measure(options: argparse.Namespace, directory: Path) -> None:
    """One run."""
    settings = ("balancer.mode=off", "balancer.min_bytes_per_s=1000", f"replication.total_replicas={options.replicas}")
    with up_cluster(directory / "data", flags=[word for each in settings for word in ("--set", each)]) as up:
        create_topic(up.bootstrap, TOPIC, options.partitions)
        cluster = ClusterConnection(up.bootstrap)
        clients = start_clients(up, directory, options)
        try:
            time.sleep(5.0)
            quiet = time.monotonic()
            time.sleep(5.0)
            grown, added = grow(up, cluster, directory / "data")
            time.sleep(2.0)
            shrunk = shrink(up, cluster, added)
            acked = stop_clients(clients)
        except BaseException:
            for one in clients:
                one.kill()
            raise
    base = [longest_gap_ms(acked[each], quiet, quiet + 1.0) for each in range(options.watched)]
    print(
        f"{options.partitions} partitions on {os.cpu_count()} cores, {sum(map(len, acked.values()))} records of "
        f"{options.record_bytes} bytes at {options.mb_per_s} MB/s, {WATCHED_SHARE:.0%} to {options.watched} watched: "
        f"none lost, doubled or out of order; between acknowledgements of a watched partition "
        f"without moves: {line(base)}"
    )
    for found in (grown, shrunk):
        report(found, acked, options.watched)


def report(found: Phase, acked: dict[int, list[float]], watched: int) -> None:
    """Print the lines of one direction."""
    row(
        f"time to balance, {found.name}",
        f"{found.seconds:.1f} s",
        limit=f"{found.moved} moves, {found.moved / found.seconds:.0f} a second",
        ratio=f"{min(found.counts.values())} to {max(found.counts.values())} partitions a broker",
        goal=f"≤ {GOAL_S:g} s",
        holds=found.seconds <= GOAL_S,
    )
    closed = [(one.opened - one.closed) * 1000 for one in found.spans]
    print(f"  closed → opened: {line(closed)}, sum {sum(closed) / 1000:.1f} s of {len(closed)} moves")
    mine = [one for one in found.spans if one.partition < watched]
    gaps = [longest_gap_ms(acked[one.partition], one.closed, one.opened + AFTER_S) for one in mine]
    drained = sorted(one.drained_bytes for one in found.spans)
    print(
        f"  uploaded while closed: median {drained[len(drained) // 2]} bytes, max {drained[-1]}; "
        f"sent to the bucket in all meanwhile: {found.sent_bytes / 1e6:.1f} MB"
    )
    print(
        f"  processor time of brokers and controllers meanwhile, load included: {found.cpu_s:.1f} s, "
        f"{1000 * found.cpu_s / max(1, found.moved):.0f} ms a move"
    )
    if gaps:
        row(
            f"producer's stall while {found.name}, {len(gaps)} watched partitions",
            f"p50 {percentile(gaps, 0.5):.0f} ms, p99 {percentile(gaps, 0.99):.0f} ms, max {max(gaps):.0f} ms",
            limit=f"summed {sum(gaps) / 1000:.1f} s",
        )


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=200 if quick() else 1_000)
    parser.add_argument("--watched", type=int, default=50 if quick() else 100)
    parser.add_argument("--mb-per-s", type=float, default=2.0)
    parser.add_argument("--record-bytes", type=int, default=1_024)
    parser.add_argument("--replicas", type=int, default=3, help="brokers that have each WAL, 1 to 3")
    with tempfile.TemporaryDirectory(prefix="tidelog-scaling-") as directory:
        measure(parser.parse_args(), Path(directory))


if __name__ == "__main__":
    main()
