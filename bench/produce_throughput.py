"""Produce throughput of a real `tidelog up`: large batches, acks=all, WAL on disk with sync flush.

    python -m bench.produce_throughput [--seconds 3] [--runs 3] [--record-bytes 1024,100] [--bucket memory|disk]

Three things take turns, so that a disk's burst and other load meet them alike:

- `disk`: bare `pwrite` + `fdatasync` of 16 MiB, the largest group that the WAL commits at once (`bench.limit_disk`);
- `bare`: the same client against a server that only receives and answers (`bench.limit_socket`);
- `broker`: `tidelog up`. Its bucket is in memory, as if it were on other machines; `--bucket disk` has the embedded
  store write everything to the WAL's disk a second time.

The clients: librdkafka through `produce_batch` (the goal is taken with it), and a replayer of requests encoded
beforehand, which costs so little that it shows the broker's own ceiling. CPU seconds are the broker's for each GB,
uploads included.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._clients import create_topic, produce_with_librdkafka, records_in, replay_produce
from bench._common import Spread, broker, cpu_seconds, directory, in_process, interleaved, quick, row, settle
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
SETTINGS = ("upload.age_ms=1000", "upload.delete_delay_ms=0", "admin.port=0")


def librdkafka(bootstrap: str, topic: str, record_bytes: int, seconds: float) -> tuple[int, float]:
    """Payload bytes acknowledged, seconds."""
    load = (bootstrap, topic, record_bytes, seconds, LIBRDKAFKA)
    found: tuple[int, float] = in_process(produce_with_librdkafka, *load)
    return found


def replay(bootstrap: str, topic: str, record_bytes: int, seconds: float) -> tuple[int, float]:
    """Payload bytes acknowledged, seconds."""
    host, _, port = bootstrap.rpartition(":")
    load = ((host, int(port)), topic, PARTITIONS, record_bytes, BATCH_BYTES, IN_FLIGHT, seconds)
    found: tuple[int, float] = in_process(replay_produce, *load)
    return found


Client = Callable[[str, str, int, float], tuple[int, float]]
CLIENTS: dict[str, Client] = {"librdkafka": librdkafka, "replay": replay}


class Measured:
    """The broker, with a topic for each run that is deleted after it: so the bucket stays small."""

    def __init__(self, tidelog: TidelogProcess) -> None:
        from confluent_kafka.admin import AdminClient

        self._tidelog = tidelog
        self._admin: Any = AdminClient({"bootstrap.servers": tidelog.bootstrap})
        self._runs = 0

    def run(self, client: Client, record_bytes: int, seconds: float) -> tuple[float, float]:
        """MB/s, and CPU seconds a GB with the uploads that follow."""
        tidelog = self._tidelog
        self._runs += 1
        topic = f"bench-{self._runs}"
        create_topic(tidelog.bootstrap, topic, PARTITIONS)
        settle(tidelog.broker_pid())
        cpu = cpu_seconds(tidelog.broker_pid())
        size, took = client(tidelog.bootstrap, topic, record_bytes, seconds)
        settle(tidelog.broker_pid())
        cpu = cpu_seconds(tidelog.broker_pid()) - cpu
        records = records_in(tidelog.bootstrap, topic, PARTITIONS)
        assert records * record_bytes == size, f"{records} records are in the log, {size // record_bytes} were sent"
        self._admin.delete_topics([topic])[topic].result(30)
        return size / 1e6 / took, cpu / (size / 1e9)


def measure(
    disk: RawDisk, bare: str, tidelog: TidelogProcess, name: str, record_bytes: int, args: argparse.Namespace
) -> None:
    """One client and size of record: print its rows."""
    client, broker_side = CLIENTS[name], Measured(tidelog)

    def against_bare() -> float:
        size, took = client(bare, TOPIC, record_bytes, args.seconds)
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
    row(
        f"produce {record_bytes:,} B, {name}",
        f"{reached.text('MB/s')}, {reached.median * 1e6 / record_bytes:,.0f} records/s, {cpu.median:.2f} CPU s/GB",
        limit=f"{smaller} {limits[smaller].text('MB/s')}",
        ratio=f"{ratio:.2f}",
        goal=f"≥ {GOAL}" if name == "librdkafka" else "",
        holds=ratio >= GOAL if name == "librdkafka" else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0 if quick() else 3.0)
    parser.add_argument("--runs", type=int, default=2 if quick() else 3)
    parser.add_argument("--record-bytes", default="1024,100")
    parser.add_argument("--clients", default="librdkafka,replay")
    parser.add_argument("--bucket", choices=("memory", "disk"), default="memory")
    parser.add_argument("--dir", default=None, help="where the WAL and the bare disk write")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        path: Path = stack.enter_context(directory(args.dir))
        disk = RawDisk(path)
        stack.callback(disk.close)
        host, port = stack.enter_context(bare_server(PARTITIONS))
        tidelog = stack.enter_context(broker(path / "data", SETTINGS, bucket_in_memory=args.bucket == "memory"))
        for record_bytes in map(int, args.record_bytes.split(",")):
            for name in args.clients.split(","):
                measure(disk, f"{host}:{port}", tidelog, name, record_bytes, args)


if __name__ == "__main__":
    main()
