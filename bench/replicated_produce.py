"""What replication costs producers: whole brokers with 1, 2 and 3 replicas of each WAL, and a real client.

    python -m bench.replicated_produce [--rounds 3] [--seconds 3] [--mb-per-s 5] [--batch-bytes 16384] [--dir DIR]
                                       [--bucket memory|disk] [--set section.key=value]

Each round measures the limits and starts three clusters, one after the other: a controller and three brokers, each a
process of its own, with 1, 2 and 3 replicas and a write quorum of 1, 2 and 2.

- Throughput: librdkafka, 1 KiB records, 6 partitions (each broker leads some), `acks=all`. Its limits: the same client
  at a bare socket server, and the bare disk (1 MiB writes, each synced).
- Latency: one raw socket to the leader of a partition sends 16 KiB requests at fixed times (`bench.produce_latency`).
  Its limits: `fdatasync` of as many bytes at those times, and the same client at the bare socket server, which answers
  at once: one round trip. Beside it stands `fdatasync` of as many files at the same time as there are replicas, for
  they share one disk here, and a bare relay to as many disks (`bench.limit_relay`): what is left if brokers do nothing.

The machine's cores and its disk are shared by all brokers and the client, nothing is pinned: with three replicas one
machine of two cores receives, checks and writes each byte three times, which three machines would do side by side. So
the ratio of the throughputs is bound by the ratio of the CPU time that a gigabyte takes all brokers together, and that
is printed, too; a cluster of three machines has three times the cores and the disks. The bucket is in memory unless
`--bucket disk` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench._clients import produce_with_librdkafka
from bench._cluster_load import PARTITIONS, RECORD_BYTES, LatencyLoad, Throughput, latencies, throughput
from bench._clusters import QUORUMS, TidelogCluster, running
from bench._common import Spread, background, directory, in_process, percentile, quick, row
from bench.limit_disk import RawDisk
from bench.limit_relay import relayed
from bench.limit_socket import TOPIC, bare_server
from bench.produce_latency import raw_client
from bench.produce_throughput import LIBRDKAFKA

THROUGHPUT_GOAL = 0.6
LATENCY_GOAL = 2.0
PARTS = {"p50": 0.5, "p99": 0.99}
RAW_BYTES = 256 << 20
SHARED_BYTES = 32 << 20
DISK_CHUNK = 1 << 20


def synced(path: Path, load: LatencyLoad, put: Callable[[Any], None]) -> None:
    """Put the latencies of one disk of several."""
    path.mkdir()
    disk = RawDisk(path, min(SHARED_BYTES, int(load.batch_bytes * load.per_s * load.seconds)))
    put(disk.latencies(load.batch_bytes, load.per_s, load.seconds))
    disk.close()


class Found:
    """The figures of all rounds of one cluster."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.cpu: list[float] = []
        self.parts: dict[str, list[float]] = {name: [] for name in PARTS}

    def add(self, produced: Throughput, took: Sequence[float]) -> None:
        """Note one round."""
        self.rates.append(produced.mb_per_s)
        self.cpu.append(produced.cpu_s_per_gb)
        self.add_latencies(took)

    def add_latencies(self, took: Sequence[float]) -> None:
        """Note one round's acknowledgements."""
        for name, part in PARTS.items():
            self.parts[name].append(percentile(took, part) * 1e3)

    def ms(self, part: str) -> Spread:
        """A percentile over the rounds."""
        return Spread.of(self.parts[part])

    @property
    def rate(self) -> Spread:
        """MB/s over the rounds."""
        return Spread.of(self.rates)


class Limits:
    """What disk and socket take without a broker."""

    def __init__(self, path: Path, file_bytes: int = RAW_BYTES, replicas: int = max(QUORUMS)) -> None:
        self.synced, self.answered, self.shared, self.relayed = Found(), Found(), Found(), Found()
        """`shared`: while `replicas` files are synced at the same time; `relayed`: by one process to the others."""
        self.replicas = replicas
        self._path = path
        self._disk = RawDisk(path, file_bytes)

    def measure(self, load: LatencyLoad) -> None:
        """Measure each once."""
        self.synced.rates.append(self._disk.throughput(DISK_CHUNK, 1.0))
        self.synced.add_latencies(self._disk.latencies(load.batch_bytes, load.per_s, load.seconds))
        with directory(str(self._path)) as place, contextlib.ExitStack() as disks:
            every = [disks.enter_context(background(synced, place / f"{n}", load)) for n in range(self.replicas)]
            self.shared.add_latencies([each for disk in every for each in disk()])
        with directory(str(self._path)) as place:
            paced = (self.replicas, load.batch_bytes, load.per_s, load.seconds)
            self.relayed.add_latencies(relayed(place, *paced))
        with bare_server(PARTITIONS) as (host, port):
            produce = (f"{host}:{port}", TOPIC, RECORD_BYTES, load.seconds, LIBRDKAFKA)
            size, took = in_process(produce_with_librdkafka, *produce)
            self.answered.rates.append(size / 1e6 / took)
            self.answered.add_latencies(
                in_process(raw_client, (host, port), TOPIC, load.batch_bytes, load.per_s, load.seconds)
            )

    def close(self) -> None:
        """Release the disk's file."""
        self._disk.close()


def report(found: dict[int, Found], limits: Limits) -> None:
    """Print a row for each number of replicas and measure."""
    one, most = found[1], max(found)
    bare = f"librdkafka at a bare socket {limits.answered.rate.text('MB/s')}, disk {limits.synced.rate.text('MB/s')}"
    for replicas, figures in found.items():
        name = f"{replicas} replicas, quorum {QUORUMS[replicas]}"
        ratio = figures.rate.median / one.rate.median
        has_goal = replicas == most > 1
        row(
            f"librdkafka to {PARTITIONS} partitions, {name}",
            f"{figures.rate.text('MB/s')}, {Spread.of(figures.cpu).text('CPU s a GB', 2)}",
            limit=bare if replicas == 1 else f"one replica {one.rate.text('MB/s')}",
            ratio=f"{figures.rate.median / limits.answered.rate.median:.2f}" if replicas == 1 else f"{ratio:.2f}",
            goal=f"≥ {THROUGHPUT_GOAL}" if has_goal else "",
            holds=ratio >= THROUGHPUT_GOAL if has_goal else None,
        )
        for part in PARTS:
            report_latency(f"acknowledged, {part}, {name}", part, figures, limits, has_goal and part == "p50")
    synced_at_once, answered = limits.shared.ms("p50").median, limits.answered.ms("p50").median
    row(
        f"acknowledged, p50, {most} replicas, beside a disk for all",
        found[most].ms("p50").text("ms", 2),
        limit=f"fdatasync of {limits.replicas} files at once {synced_at_once:.2f} + round trip {answered:.2f} ms",
        ratio=f"{found[most].ms('p50').median / (synced_at_once + answered):.2f}",
    )
    bare_relay = limits.relayed.ms("p50")
    row(
        f"acknowledged, p50, {most} replicas, beside a bare relay",
        found[most].ms("p50").text("ms", 2),
        limit=f"blocking sockets and {limits.replicas} disks {bare_relay.text('ms', 2)}",
        ratio=f"{found[most].ms('p50').median / bare_relay.median:.2f}",
    )
    cpu = statistics.median(found[most].cpu) / statistics.median(one.cpu)
    row("CPU of all brokers a GB, most replicas to one", f"{cpu:.2f}")


def report_latency(measure: str, part: str, figures: Found, limits: Limits, has_goal: bool) -> None:
    """Print the row of one percentile."""
    synced, answered = limits.synced.ms(part).median, limits.answered.ms(part).median
    ratio = figures.ms(part).median / (synced + answered)
    row(
        measure,
        figures.ms(part).text("ms", 2),
        limit=f"fdatasync {synced:.2f} + round trip {answered:.2f} ms",
        ratio=f"{ratio:.2f}",
        goal=f"≤ {LATENCY_GOAL}" if has_goal else "",
        holds=ratio <= LATENCY_GOAL if has_goal else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 if quick() else 3)
    parser.add_argument("--seconds", type=float, default=1.0 if quick() else 3.0)
    parser.add_argument("--mb-per-s", type=float, default=5.0)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--replicas", default="1,2,3", help="the clusters to measure, the first is 1")
    parser.add_argument("--bucket", choices=("memory", "disk"), default="memory")
    parser.add_argument("--dir", default=None, help="where the brokers and the bare disk write")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    load = LatencyLoad(args.batch_bytes, args.mb_per_s, args.seconds)
    found = {int(each): Found() for each in args.replicas.split(",")}
    with directory(args.dir) as path, contextlib.closing(Limits(path, replicas=max(found))) as limits:
        for number in range(args.rounds):
            limits.measure(load)
            for replicas, figures in found.items():
                with directory(args.dir) as place:
                    made = TidelogCluster(
                        place / "cluster", replicas, args.set, bucket_in_memory=args.bucket == "memory"
                    )
                    with running(made) as cluster:
                        figures.add(throughput(cluster, args.seconds), latencies(cluster, load))
                text = ", ".join(f"{part} {values[-1]:.2f} ms" for part, values in figures.parts.items())
                said = f"round {number + 1}, {replicas} replicas: {figures.rates[-1]:.0f} MB/s, {text}"
                print(f"  {said}, {figures.cpu[-1]:.2f} CPU s a GB, load {os.getloadavg()[0]:.1f}", flush=True)
    report(found, limits)


if __name__ == "__main__":
    main()
