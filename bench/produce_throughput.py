"""Produce throughput of a real `tidelog up`: large batches, acks=all, WAL on disk with sync flush.

    python -m bench.produce_throughput [--seconds 3] [--runs 3] [--record-bytes 1024,100]
                                       [--cores pinned,shared] [--bucket elsewhere|memory|disk]

Three measurements alternate, so that bursts of the disk and other load affect them equally:

- `disk`: bare `pwrite` + `fdatasync` of 16 MiB, the largest group that the WAL commits at once (`bench.limit_disk`);
- `bare`: the same client against a server that only receives and responds (`bench.limit_socket`);
- `broker`: `tidelog up`. Its bucket is elsewhere (`bench._sink`): the cost includes the broker's S3 client, but not the
  storage of objects. With `--bucket memory` the embedded store keeps them in a folder in memory, and the broker's core
  does the bucket's work, too; with `disk` everything is written to the WAL's disk a second time.

Pinned, the server has the first core and the client the second, as if on separate machines. The goal applies to this
mode: with shared cores, a server without cost leaves more CPU to the client, so the limit would be that of a faster
client. The result with shared cores is also reported, for 1 KiB records of librdkafka.

The clients: librdkafka through `produce_batch` (used for the goal), and a replayer of prepared requests, whose low cost
shows the broker's own limit. CPU seconds are the broker's per GB, including uploads. There is no compaction meanwhile;
its cost is in `bench.cost_per_gb`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._bucket import environment
from bench._clients import create_topic, produce_with_librdkafka, records_in, replay_produce
from bench._common import (
    Spread,
    broker,
    cpu_seconds,
    directory,
    in_process,
    interleaved,
    quick,
    row,
    say_new_pages,
    settle,
)
from bench._sink import sink
from bench.limit_disk import RawDisk
from bench.limit_socket import TOPIC, bare_server
from tests.support.tidelog_process import TidelogProcess

PARTITIONS = 4
BATCH_BYTES = 1_000_000
"""librdkafka's default `batch.size`, and Kafka's default bound on a batch is a little more."""
IN_FLIGHT = 5
DISK_CHUNK_BYTES = 16 << 20
GOAL = 0.7
LIBRDKAFKA = {
    "linger.ms": 50,  # or small records go in small batches
    "batch.size": BATCH_BYTES,
    "batch.num.messages": 100_000,
    "queue.buffering.max.kbytes": 65_536,
    "queue.buffering.max.messages": 1_000_000,
}
SETTINGS = ("upload.age_ms=1000", "upload.delete_delay_ms=0", "compaction.enabled=false", "admin.port=0")


@dataclass(frozen=True)
class Cores:
    """Cores of the two sides; None: no pinning."""

    name: str
    server: set[int] | None = None
    client: set[int] | None = None


CORES = {one.name: one for one in (Cores("pinned", {0}, {1}), Cores("shared"))}


def librdkafka(bootstrap: str, topic: str, record_bytes: int, seconds: float, cores: Cores) -> tuple[int, float]:
    """Run librdkafka; return acknowledged payload bytes and seconds."""
    load = (bootstrap, topic, record_bytes, seconds, LIBRDKAFKA)
    found: tuple[int, float] = in_process(produce_with_librdkafka, *load, cores=cores.client)
    return found


def replay(bootstrap: str, topic: str, record_bytes: int, seconds: float, cores: Cores) -> tuple[int, float]:
    """Run the replayer; return acknowledged payload bytes and seconds."""
    host, _, port = bootstrap.rpartition(":")
    load = ((host, int(port)), topic, PARTITIONS, record_bytes, BATCH_BYTES, IN_FLIGHT, seconds)
    found: tuple[int, float] = in_process(replay_produce, *load, cores=cores.client)
    return found


Client = Callable[[str, str, int, float, Cores], tuple[int, float]]
CLIENTS: dict[str, Client] = {"librdkafka": librdkafka, "replay": replay}


def runs_for(cores: Cores, clients: str, record_bytes: str) -> list[tuple[str, int]]:
    """The measured (client, record size) pairs: all of them if pinned, those of the goal if shared."""
    chosen = [(name, int(size)) for size in record_bytes.split(",") for name in clients.split(",")]
    return chosen if cores.name == "pinned" else [one for one in chosen if one == ("librdkafka", 1024)]


class Measured:
    """The broker, with a topic per run that is deleted afterwards to keep the bucket small."""

    def __init__(self, tidelog: TidelogProcess, cores: Cores) -> None:
        from confluent_kafka.admin import AdminClient

        self._tidelog = tidelog
        self._admin: Any = AdminClient({"bootstrap.servers": tidelog.bootstrap})
        self._cores = cores

    def run(self, client: Client, record_bytes: int, seconds: float) -> tuple[float, float]:
        """Return MB/s, and CPU seconds per GB including the following uploads."""
        tidelog = self._tidelog
        topic = f"bench-{os.urandom(4).hex()}"
        create_topic(tidelog.bootstrap, topic, PARTITIONS)
        settle(tidelog.broker_pid())
        cpu = cpu_seconds(tidelog.broker_pid())
        size, took = client(tidelog.bootstrap, topic, record_bytes, seconds, self._cores)
        settle(tidelog.broker_pid())
        cpu = cpu_seconds(tidelog.broker_pid()) - cpu
        records = records_in(tidelog.bootstrap, topic, PARTITIONS)
        assert records * record_bytes == size, f"{records} records are in the log, {size // record_bytes} were sent"
        self._admin.delete_topics([topic])[topic].result(30)
        return size / 1e6 / took, cpu / (size / 1e9)


def measure(
    disk: RawDisk,
    bare: str,
    broker_side: Measured,
    name: str,
    record_bytes: int,
    cores: Cores,
    args: argparse.Namespace,
) -> None:
    """One client and size of record: print its rows."""
    client = CLIENTS[name]

    def against_bare() -> float:
        size, took = client(bare, TOPIC, record_bytes, args.seconds, cores)
        return size / 1e6 / took

    def on_disk() -> float:
        return disk.throughput(DISK_CHUNK_BYTES, min(args.seconds, 1.0))

    broker_side.run(client, record_bytes, args.seconds)  # the WAL's files are made and recycled from then on
    found = interleaved(
        args.runs,
        disk=on_disk,
        bare=against_bare,
        broker=lambda: broker_side.run(client, record_bytes, args.seconds),
    )
    reached = Spread.of(speed for speed, _ in found["broker"])
    cpu = Spread.of(cpu for _, cpu in found["broker"])
    limits = {"disk": Spread.of(found["disk"]), "bare socket": Spread.of(found["bare"])}
    for what, limit in limits.items():
        print(f"  {what:12s} {limit.text('MB/s')}", flush=True)
    smaller = min(limits, key=lambda what: limits[what].median)
    ratio = reached.median / limits[smaller].median
    is_goal = name == "librdkafka" and cores.name == "pinned"
    row(
        f"produce {record_bytes:,} B, {name}{'' if cores.name == 'pinned' else ', cores shared'}",
        f"{reached.text('MB/s')}, {reached.median * 1e6 / record_bytes:,.0f} records/s, {cpu.median:.2f} CPU s/GB",
        limit=f"{smaller} {limits[smaller].text('MB/s')}",
        ratio=f"{ratio:.2f}",
        goal=f"≥ {GOAL}" if is_goal else "",
        holds=ratio >= GOAL if is_goal else None,
    )


def measure_all(
    disk: RawDisk, data_dir: Path, cores: Cores, wanted: list[tuple[str, int]], args: argparse.Namespace
) -> None:
    """Run all measurements with one assignment of cores."""
    with contextlib.ExitStack() as stack:
        settings: tuple[str, ...] = SETTINGS
        if args.bucket == "elsewhere":
            os.environ.update(environment())
            settings += (f"s3.endpoint={stack.enter_context(sink(cores.client))}", "s3.bucket=bench")
        host, port = stack.enter_context(bare_server(PARTITIONS, cores=cores.server))
        tidelog = stack.enter_context(
            broker(data_dir, settings, bucket_in_memory=args.bucket == "memory", cores=cores.server)
        )
        broker_side = Measured(tidelog, cores)
        for name, record_bytes in wanted:
            measure(disk, f"{host}:{port}", broker_side, name, record_bytes, cores, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0 if quick() else 3.0)
    parser.add_argument("--runs", type=int, default=2 if quick() else 3)
    parser.add_argument("--record-bytes", default="1024,100")
    parser.add_argument("--clients", default="librdkafka,replay")
    parser.add_argument("--cores", default="pinned,shared")
    parser.add_argument("--bucket", choices=("elsewhere", "memory", "disk"), default="elsewhere")
    parser.add_argument("--dir", default=None, help="where the WAL and the bare disk write")
    args = parser.parse_args()
    say_new_pages()
    with contextlib.ExitStack() as stack:
        path: Path = stack.enter_context(directory(args.dir))
        disk = RawDisk(path)
        stack.callback(disk.close)
        for cores in map(CORES.__getitem__, args.cores.split(",")):
            wanted = runs_for(cores, args.clients, args.record_bytes)
            if wanted:
                measure_all(disk, path / cores.name, cores, wanted, args)


if __name__ == "__main__":
    main()
