"""Unavailability of a partition for writes and reads while it moves between brokers.

    python -m bench.partition_moves --partitions 100 --mb-per-s 20 --moves 300 --clients confluent,aiokafka \\
        --back-offs 10,defaults                      # the full figure; without arguments a short look
    python -m bench.partition_moves --sizes 10MB,1GB,10GB-metadata

Three brokers and three controllers as processes. Each client library has a share of the partitions (confluent 7,
aiokafka 1) and two processes, an idempotent producer at a constant rate and a consumer (`bench._move_clients`).
Partitions are moved to the next broker, sequentially or `--side-by-side` several. A partition's stall is the longest
gap between two acknowledgements (arrivals) that overlaps the time from its close at the source to 0.2 s after its
opening at the target; the same figure for spans of the same length without a move is printed for comparison. Every
record contains its number, and the run fails if one is lost, duplicated or out of order.

`--back-offs 10` sets each client's back-off to 10 ms; `defaults` leaves librdkafka's 100 ms (consumer: 500 ms) and
aiokafka's 100 ms, which are then included in every figure.

`--sizes` moves one partition of each size back and forth under a small load: the stall must not grow with the size.
`10GB-metadata` has as many segments (10) and uploaded objects (1,280) as 10 GB have, each small.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import Producer

from bench._common import percentile, quick, row
from bench._move_clients import Job
from tests.e2e.backends import create_topic
from tests.support.cluster_process import UpCluster, eventually, up_cluster
from tidelog.cli.client import ClusterConnection, http_json

TOPIC = "moved"
SHARES = {"confluent": 7, "aiokafka": 1}
AFTER_S = 0.2
"""Time after the opening at the target within which the acknowledgement that ends the gap arrives."""
SETTLE_S = 0.3
STEPS = ("close", "drain", "hand_over")
SIZES = {"10MB": 10 << 20, "1GB": 1 << 30}
METADATA_OBJECTS, METADATA_SEGMENTS = 1_280, 10
MIB = 1 << 20


class Client:
    """One process of `bench._move_clients`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        command = [sys.executable, "-m", "bench._move_clients", msgspec.json.encode(job).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == "ready"

    def stop(self) -> dict[int, list[float]]:
        """Stop; return times by partition. Raises `AssertionError` for lost, duplicate or reordered records."""
        self._process.communicate("stop\n", timeout=120)
        assert self._process.returncode == 0, self.job
        found = json.loads(Path(self.job.out).read_text())
        assert not found["faults"], (self.job.role, self.job.client, found["faults"][:5])
        return {int(partition): times for partition, times in found["times"].items()}

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait(30)


@dataclass(frozen=True)
class Span:
    """One move: monotonic seconds of the source's close and of the target's opening, and the source's steps."""

    partition: int
    closed: float
    opened: float
    steps_ms: dict[str, float]
    drained_bytes: int
    hinted: bool


class Load:
    """The clients of one run."""

    def __init__(
        self, up: UpCluster, directory: Path, options: argparse.Namespace, back_off_ms: int, topic: str
    ) -> None:
        self._clients: list[Client] = []
        partitions = list(range(options.partitions))
        shares = [(name, SHARES[name]) for name in options.clients.split(",")]
        whole, at = sum(share for _, share in shares), 0
        for number, (name, share) in enumerate(shares):
            end = len(partitions) if number + 1 == len(shares) else at + len(partitions) * share // whole
            mine, at = partitions[at:end], end
            for role in ("consume", "produce"):
                rate = options.mb_per_s * 1e6 * len(mine) / len(partitions)
                out = directory / f"{topic}-{name}-{role}.json"
                self._clients.append(
                    Client(
                        Job(
                            role=role,
                            client=name,
                            bootstrap=up.bootstrap,
                            topic=topic,
                            partitions=mine,
                            rate_bytes=rate,
                            record_bytes=options.record_bytes,
                            back_off_ms=back_off_ms,
                            out=str(out),
                        )
                    )
                )

    def stop(self) -> dict[tuple[str, str], dict[int, list[float]]]:
        """Stop all; return times by partition, by client and role. Checks that everything written was read."""
        producers = {one.job.client: one.stop() for one in self._clients if one.job.role == "produce"}
        consumers = {one.job.client: one.stop() for one in self._clients if one.job.role == "consume"}
        for name, acked in producers.items():
            for partition, times in acked.items():
                read = len(consumers[name][partition])
                assert read == len(times), f"partition {partition}: {len(times)} acknowledged, {read} read"
        return {
            **{(name, "producer"): times for name, times in producers.items()},
            **{(name, "consumer"): times for name, times in consumers.items()},
        }

    def kill(self) -> None:
        """Kill all clients after a failure."""
        for one in self._clients:
            one.kill()


def longest_gap_ms(times: list[float], start: float, end: float) -> float:
    """The longest gap between neighbours that overlaps `[start, end]`, in ms."""
    first = max(0, bisect_left(times, start) - 1)
    last = min(len(times), bisect_left(times, end) + 1)
    return max((later - earlier for earlier, later in pairwise(times[first:last])), default=0.0) * 1000


def move_all(cluster: ClusterConnection, topic: str, moves: int, partitions: int, side_by_side: int) -> None:
    """Move partitions to the next broker, in waves."""
    done = 0
    order = sorted(range(partitions), key=lambda number: number * 0.618034 % 1)  # all clients have a share early on
    while done < moves:
        wave = [order[(done + step) % partitions] for step in range(min(side_by_side, moves - done, partitions))]
        done += len(wave)
        rows = {each["partition"]: each for each in cluster.get(f"/partitions?topic={topic}")["partitions"]}
        wanted = {each: rows[each]["broker"] % 3 + 1 for each in wave}
        body = {"moves": [{"topic": topic, "partition": each, "to": to} for each, to in wanted.items()]}
        assert all(one["error"] is None for one in cluster.post("/moves", body)["results"])

        def arrived(wanted: dict[int, int] = wanted) -> bool:
            now = cluster.get(f"/partitions?topic={topic}")["partitions"]
            return all(now[each]["broker"] == to for each, to in wanted.items())

        eventually(arrived)
        time.sleep(SETTLE_S)


def spans_of(cluster: ClusterConnection, topic: str) -> list[Span]:
    """The completed moves of a topic, as reported by source and target; steps not reported by a target are left out."""
    wall_to_monotonic = time.monotonic() - time.time()
    reports = [http_json(node["admin_url"], "/moves") for node in cluster.get("/status")["nodes"]]
    arrivals = {
        (one["partition"], one["leader_epoch"]): one
        for report in reports
        for one in report["opened"]
        if one["topic"] == topic
    }
    found = []
    for one in [one for report in reports for one in report["moves"] if one["topic"] == topic]:
        arrival = arrivals.get((one["partition"], one["leader_epoch"] + 1))
        if one["phase"] != "done" or arrival is None:
            continue
        closed, opened = (ms / 1000 + wall_to_monotonic for ms in (one["closed_ms"], arrival["at_ms"]))
        steps = {name: one["steps_ms"][name] for name in STEPS} | {"open": arrival["open_ms"]}
        found.append(Span(one["partition"], closed, opened, steps, one["drained_bytes"], arrival["hinted"]))
    return found


def line(values: list[float], digits: int = 0) -> str:
    """p50, p99, max."""
    return (
        f"p50 {statistics.median(values):.{digits}f}, p99 {percentile(values, 0.99):.{digits}f}, "
        f"max {max(values):.{digits}f} ms"
    )


def measure(up: UpCluster, directory: Path, options: argparse.Namespace, back_off: str) -> None:
    """One run."""
    topic = f"{TOPIC}-{back_off}"
    create_topic(up.bootstrap, topic, options.partitions)
    cluster = ClusterConnection(up.bootstrap)
    load = Load(up, directory, options, 0 if back_off == "defaults" else int(back_off), topic)
    try:
        time.sleep(3.0)
        quiet_from = time.monotonic()
        time.sleep(5.0)
        quiet_to = time.monotonic()
        move_all(cluster, topic, options.moves, options.partitions, options.side_by_side)
        spans = spans_of(cluster, topic)
        seen = load.stop()
    except BaseException:
        load.kill()
        raise
    assert len(spans) == options.moves, f"{len(spans)} of {options.moves} moves told of"
    report(options, back_off, seen, spans, (quiet_from, quiet_to))


def report(
    options: argparse.Namespace,
    back_off: str,
    seen: dict[tuple[str, str], dict[int, list[float]]],
    spans: list[Span],
    quiet: tuple[float, float],
) -> None:
    """Print the lines."""
    kind = "its own back-off" if back_off == "defaults" else f"back-off {back_off} ms"
    acked = {key: sum(map(len, times.values())) for key, times in seen.items()}
    written = sum(count for (_, role), count in acked.items() if role == "producer")
    seconds = max(times[-1] for each in seen.values() for times in each.values() if times) - quiet[0] + 3.0
    print(
        f"{len(spans)} moves, {options.side_by_side} side by side, {options.partitions} partitions, "
        f"{written * options.record_bytes / seconds / 1e6:.1f} MB/s of {options.mb_per_s}, {written} records of "
        f"{options.record_bytes} bytes: none lost, doubled or out of order; clients with {kind}"
    )
    width = statistics.median(span.opened - span.closed for span in spans) + AFTER_S
    for (name, role), times in seen.items():
        mine = [span for span in spans if span.partition in times]
        if not mine:
            continue
        base = [
            longest_gap_ms(times[span.partition], quiet[0] + number % 4, quiet[0] + number % 4 + width)
            for number, span in enumerate(mine)
        ]
        found = [longest_gap_ms(times[span.partition], span.closed, span.opened + AFTER_S) for span in mine]
        p50, p99, top = statistics.median(found), percentile(found, 0.99), max(found)
        row(
            f"{name}'s {role}, stall in a move, {kind}",
            f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {top:.0f} ms",
            limit=f"without moves {line(base)}",
            ratio=f"{p50 / max(statistics.median(base), 1e-3):.1f} (p50)",
            goal="p50 ≤ 80 ms, p99 ≤ 300 ms, max ≤ 1 s",
            holds=p50 <= 80 and p99 <= 300 and top <= 1_000,
        )
        after = [times[span.partition][bisect_left(times[span.partition], span.opened)] for span in mine]
        waits = [(at - one.opened) * 1000 for at, one in zip(after, mine, strict=True)]
        print(f"  opened → first {role}'s: {line(waits)}")
    for name in (*STEPS, "open"):
        print(f"  step {name}: {line([span.steps_ms[name] for span in spans], 1)}")
    print(f"  closed → opened: {line([(span.opened - span.closed) * 1000 for span in spans])}")
    sizes = sorted(span.drained_bytes for span in spans)
    hinted = sum(span.hinted for span in spans)
    print(f"  uploaded while closed: median {statistics.median(sizes):.0f} bytes, max {sizes[-1]}; {hinted} by hint")


# --- sizes -----------------------------------------------------------------------------------------------------------


def fill(up: UpCluster, topic: str, size: str) -> None:
    """Fill partition 0 of `topic` to `size`, all of it uploaded."""
    cluster = ClusterConnection(up.bootstrap)
    if size in SIZES:
        create_topic(up.bootstrap, topic, 1)
    else:
        create_topic(up.bootstrap, topic, 1, **{"segment.bytes": str(METADATA_OBJECTS * 1_024 // METADATA_SEGMENTS)})
    nodes = {node["id"]: node["admin_url"] for node in cluster.get("/status")["nodes"]}
    leads = cluster.get(f"/partitions?topic={topic}")["partitions"][0]["broker"]
    leader = cluster.at(nodes[leads], leads)
    producer = Producer({"bootstrap.servers": up.bootstrap, "linger.ms": 5, "log_level": 0, "batch.size": MIB})
    if size in SIZES:
        value = bytes(64 << 10)
        for number in range(SIZES[size] // len(value)):
            while len(producer) > 500:
                producer.poll(0.01)
            producer.produce(topic, number.to_bytes(8, "big") + value[8:], partition=0)
    else:
        for number in range(METADATA_OBJECTS):
            producer.produce(topic, number.to_bytes(8, "big") + bytes(1_000), partition=0)
            assert producer.flush(60) == 0
            leader.post("/upload")
    assert producer.flush(300) == 0
    leader.post("/upload")


def measure_sizes(up: UpCluster, directory: Path, options: argparse.Namespace) -> None:
    """The stall by the size of the partition."""
    cluster = ClusterConnection(up.bootstrap)
    for size in options.sizes.split(","):
        topic = f"of-{size}"
        fill(up, topic, size)
        begin = _end_offset(up, topic)
        acked: list[float] = []
        producer = Producer(
            {
                "bootstrap.servers": up.bootstrap,
                "enable.idempotence": True,
                "retry.backoff.ms": 10,
                "linger.ms": LINGER_MS,
                "log_level": 0,
            }
        )
        offsets: list[int] = []

        def done(error: Any, message: Any, acked: list[float] = acked, offsets: list[int] = offsets) -> None:
            assert error is None, error
            acked.append(time.monotonic())
            offsets.append(message.offset())

        for _ in range(options.size_moves):
            to = cluster.get(f"/partitions?topic={topic}")["partitions"][0]["broker"] % 3 + 1
            cluster.post("/moves", {"moves": [{"topic": topic, "partition": 0, "to": to}]})
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                producer.produce(topic, bytes(1_000), partition=0, on_delivery=done)
                producer.poll(0.005)
            here = cluster.get(f"/partitions?topic={topic}")["partitions"][0]["broker"]
            assert here == to, f"after 1.5 s it is on {here}, not on {to}"
        assert producer.flush(60) == 0
        assert offsets == list(range(begin, begin + len(offsets))), "lost, doubled or reordered"
        spans = spans_of(cluster, topic)
        gaps = [longest_gap_ms(acked, span.closed, span.opened + AFTER_S) for span in spans]
        opens = [span.steps_ms["open"] for span in spans]
        print(
            f"partition of {size}: {len(spans)} moves, stall {line(gaps)}; closed → opened "
            f"{line([(span.opened - span.closed) * 1000 for span in spans])}; open {line(opens, 1)}; "
            f"{sum(span.hinted for span in spans)} by hint"
        )


LINGER_MS = 2


def _end_offset(up: UpCluster, topic: str) -> int:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": up.bootstrap, "group.id": "ends", "log_level": 0})
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=60)
    consumer.close()
    return int(end)


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=24 if quick() else 60)
    parser.add_argument("--partitions", type=int, default=20)
    parser.add_argument("--mb-per-s", type=float, default=4.0)
    parser.add_argument("--record-bytes", type=int, default=4_096)
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--clients", default="confluent,aiokafka", help="of confluent, aiokafka")
    parser.add_argument("--back-offs", default="10", help="10, defaults, or both")
    parser.add_argument("--sizes", default="", help="of 10MB, 1GB, 10GB-metadata: only that")
    parser.add_argument("--size-moves", type=int, default=12)
    parser.add_argument("--replicas", type=int, default=3, help="brokers that have each WAL, 1 to 3")
    options = parser.parse_args()
    flags = ("--set", f"replication.total_replicas={options.replicas}")
    with (
        tempfile.TemporaryDirectory(prefix="tidelog-moves-") as directory,
        up_cluster(Path(directory) / "data", flags=flags) as up,
    ):
        if options.sizes:
            measure_sizes(up, Path(directory), options)
            return
        for back_off in options.back_offs.split(","):
            measure(up, Path(directory), options, back_off)


if __name__ == "__main__":
    main()
