"""Tail fetch from a real `tidelog up`: 1 and 10 consumers read from its memory, compared with the bare socket.

    python -m bench.tail_fetch [--seconds 3] [--runs 3] [--fill-mb 256] [--batch-bytes 131072]

Consumers are raw sockets that read the batches' headers only (`bench._clients.Consumer`), a megabyte per request, one
request at a time on each connection, like real ones; all of them read the same partition, which is in the log cache,
from its start to its end, repeatedly. They alternate with the same consumers at `bench.limit_socket`, which responds to
each request with the same megabyte, or with one of as many as the partition has: a single megabyte stays in the CPU
cache, which is another limit, reported beside the goal. Figures are the sums of bytes received. The server is pinned to
one core and the consumers to the other.

`live` has the consumers follow a producer of `--live-mb-per-s`, and shows the lag of the slowest behind its
acknowledgements when the producer stopped.

`fill`, `Consumer` and `TOPIC` are also used by other programs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._clients import (
    Address,
    connect,
    create_topic,
    produce_frame,
    produce_once,
    records_a_batch,
    run_threads,
)
from bench._clients import Consumer as RawConsumer
from bench._common import Spread, broker, cpu_seconds, directory, in_process, interleaved, quick, row, settle
from bench.limit_socket import TOPIC, bare_server, consume
from tests.support.tidelog_process import TidelogProcess

RECORD_BYTES = 1024
GOAL = 0.6
SETTINGS = ("upload.age_ms=1000", "admin.port=0")


class Consumer(RawConsumer):
    """Reads one partition of `TOPIC`."""

    def __init__(self, address: Address, partition: int) -> None:
        super().__init__(address, TOPIC, partition)


def fill(bootstrap: str, partitions: int, size: int, batch_bytes: int) -> None:
    """Create `TOPIC` and write about `size` bytes into it, spread over the partitions, in batches of that size."""
    create_topic(bootstrap, TOPIC, partitions)
    host, _, port = bootstrap.rpartition(":")
    run_threads(
        [
            functools.partial(_fill_one, (host, int(port)), partition, size // partitions, batch_bytes)
            for partition in range(partitions)
        ]
    )


def _fill_one(address: Address, partition: int, size: int, batch_bytes: int) -> None:
    frame = produce_frame(TOPIC, partition, RECORD_BYTES, batch_bytes)
    one, scratch = connect(address), memoryview(bytearray(4096))
    for _ in range(max(1, size // batch_bytes)):
        one.sendall(frame)
        produce_once(one, scratch)
    one.close()


def measure(tidelog: TidelogProcess, bare: Address, stored: Address, consumers: int, args: argparse.Namespace) -> None:
    """Print the rows for the given number of consumers."""
    address, pid = ("127.0.0.1", tidelog.port), tidelog.broker_pid()

    def read(server: Address) -> tuple[float, float]:
        cpu = cpu_seconds(pid)
        size, seconds = in_process(consume, server, TOPIC, [0] * consumers, args.seconds, cores={1})
        return size / 1e6 / seconds, (cpu_seconds(pid) - cpu) / (size / 1e9)

    found = interleaved(args.runs, bare=lambda: read(bare), broker=lambda: read(address), stored=lambda: read(stored))
    limit = Spread.of(speed for speed, _ in found["bare"])
    from_memory = Spread.of(speed for speed, _ in found["stored"])
    reached = Spread.of(speed for speed, _ in found["broker"])
    cpu = Spread.of(cpu for _, cpu in found["broker"])
    ratio = reached.median / limit.median
    row(
        f"tail fetch, {consumers} consumer{'s' if consumers > 1 else ''}",
        f"{reached.text('MB/s')}, {cpu.median:.2f} CPU s/GB",
        limit=f"bare socket {limit.text('MB/s')}",
        ratio=f"{ratio:.2f}",
        goal=f"≥ {GOAL}",
        holds=ratio >= GOAL,
    )
    row(
        f"tail fetch, {consumers} consumer{'s' if consumers > 1 else ''}, of a server that goes through as much memory",
        f"{reached.median:,.0f} MB/s",
        limit=f"bare socket {from_memory.text('MB/s')}",
        ratio=f"{reached.median / from_memory.median:.2f}",
    )


# --- following a producer --------------------------------------------------------------------------------------------


def follow(address: Address, consumers: int, mb_per_s: float, seconds: float, put: Callable[[Any], None]) -> None:
    """Put (bytes consumed, seconds, longest time in seconds until all consumers had the last record)."""
    frame_bytes = 65_536
    start = _end_of(address)
    frame = produce_frame(TOPIC, 0, RECORD_BYTES, frame_bytes)
    per_frame = records_a_batch(RECORD_BYTES, frame_bytes)
    count = int(mb_per_s * 1e6 * seconds / frame_bytes)
    end = start + count * per_frame
    sizes: list[int] = []
    acknowledged: list[float] = []
    arrived: list[float] = []

    def write() -> None:
        one, scratch = connect(address), memoryview(bytearray(4096))
        started = time.perf_counter()
        for number in range(count):
            pause = started + number * frame_bytes / (mb_per_s * 1e6) - time.perf_counter()
            if pause > 0:
                time.sleep(pause)
            one.sendall(frame)
            produce_once(one, scratch)
        acknowledged.append(time.perf_counter())
        one.close()

    def read() -> None:
        consumer, offset, total = Consumer(address, 0), start, 0
        while offset < end:
            offset, size = consumer.fetch(offset)
            total += size
        arrived.append(time.perf_counter())
        sizes.append(total)
        consumer.close()

    started = time.perf_counter()
    run_threads([write, *[read] * consumers])
    put((sum(sizes), max(arrived) - started, max(arrived) - acknowledged[0]))


def _end_of(address: Address) -> int:
    """The partition's end, found by reading; requires no concurrent writes."""
    consumer = Consumer(address, 0)
    end = consumer.find_end()
    consumer.close()
    return end


def live(tidelog: TidelogProcess, consumers: int, args: argparse.Namespace) -> None:
    """Print the row for consumers that follow a producer."""
    pid = tidelog.broker_pid()
    cpu = cpu_seconds(pid)
    load = (("127.0.0.1", tidelog.port), consumers, args.live_mb_per_s, args.seconds)
    size, seconds, behind = in_process(follow, *load, cores={1})
    cpu = cpu_seconds(pid) - cpu
    row(
        f"live tail, {consumers} consumers behind {args.live_mb_per_s:g} MB/s",
        f"{size / 1e6 / seconds:,.0f} MB/s served, the last was {behind * 1e3:.1f} ms behind the ack, "
        f"{cpu / (size / 1e9):.2f} CPU s/GB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5 if quick() else 3.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fill-mb", type=int, default=256, help="must fit into the log cache (512 MiB)")
    parser.add_argument("--batch-bytes", type=int, default=131_072)
    parser.add_argument("--live-mb-per-s", type=float, default=10.0)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        path: Path = stack.enter_context(directory())
        bare = stack.enter_context(bare_server(cores={0}))
        stored = stack.enter_context(bare_server(cores={0}, stored_mb=args.fill_mb))
        tidelog = stack.enter_context(broker(path / "data", SETTINGS, bucket_in_memory=True, cores={0}))
        fill(tidelog.bootstrap, 1, args.fill_mb << 20, args.batch_bytes)
        settle(tidelog.broker_pid())
        for consumers in (1, 10):
            measure(tidelog, bare, stored, consumers, args)
        live(tidelog, 10, args)


if __name__ == "__main__":
    main()
