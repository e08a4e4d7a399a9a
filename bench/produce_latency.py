"""Produce latency of a real `tidelog up` at 5 MB/s, acks=all, WAL on disk with sync flush, vs. bare `fdatasync`.

    python -m bench.produce_latency [--seconds 5] [--runs 3] [--mb-per-s 5] [--batch-bytes 16384]
                                    [--cores pinned|shared]

`raw` writes and syncs the size of a batch, in place, at the same rate (`bench.limit_disk`); `broker` is one raw socket
that sends one Produce request with such a batch at those times, without waiting for the previous response. So the wait
for the previous one counts in both, also where the socket is full and takes no request in time, and the delay of the
timer in neither, because it is the kernel's. They alternate.

`bare` is the same raw socket with `bench.limit_socket`, which reads the same requests and responds immediately: the
time of sending, two wake-ups and receiving on this machine after 3 ms idle. No server on this disk and socket is faster
than both together; the ratio to the disk alone is printed beside the goal.

First, the broker gets a second of large batches at full speed: its WAL then has enough files to recycle, like a broker
that has run for a while, and fills none with zeros during a measurement. The file of `raw` is also filled first.

Pinned, the broker (and `raw`, and the bare server) has the first core and the client the second, as if on separate
machines.

`librdkafka` is `confluent_kafka` with `linger.ms=0` and records of 1 KiB at the same rate: its latency is from
`produce()` to the delivery report and includes its own thread switches. The same client with `bench.limit_socket`,
which responds immediately, shows the client's share.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench._clients import Address, check_produced, connect, create_topic, flush, produce_frame, replay_produce
from bench._common import Spread, broker, directory, in_process, interleaved, on_cores, percentile, quick, row, settle
from bench.limit_disk import RawDisk
from bench.limit_socket import TOPIC, bare_server
from tests.support.tidelog_process import TidelogProcess

RECORD_BYTES = 1024
PARTS = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
GOALS = {"p50": 1.5, "p99": 3.0}
SETTINGS = ("admin.port=0",)
WARM_UP_S = 0.5
FILL_S = 1.0
PATIENCE_S = 30.0
_INT32 = struct.Struct(">i")


def raw_client(
    address: Address, topic: str, batch_bytes: int, per_s: float, seconds: float, put: Callable[[Any], None]
) -> None:
    """Put the latencies, in seconds, of requests sent `per_s` times per second.

    Those that were due while another was being sent count from then: the server did not read in time. The delay of the
    timer is not counted.
    """
    frame = produce_frame(topic, 0, RECORD_BYTES, batch_bytes)
    one, scratch, filled = connect(address), memoryview(bytearray(1 << 16)), 0
    sent: deque[float] = deque()
    latencies: list[float] = []
    started = time.perf_counter() + 0.05
    number, count, woke = 0, int((seconds + WARM_UP_S) * per_s), started
    while number < count or sent:
        next_at = started + number / per_s if number < count else float("inf")
        wait_s = next_at - time.perf_counter()
        if wait_s <= 0:
            one.settimeout(PATIENCE_S)
            sent.append(max(next_at, woke))
            one.sendall(frame)
            number += 1
            continue
        if not sent:
            time.sleep(wait_s)
            woke = time.perf_counter()
            continue
        one.settimeout(min(wait_s, PATIENCE_S))
        try:
            got = one.recv_into(scratch[filled:])
        except TimeoutError:
            if wait_s > PATIENCE_S:
                raise
            woke = time.perf_counter()
            continue
        woke = ended = time.perf_counter()
        if not got:
            raise ConnectionError("the server closed the connection")
        filled, at = filled + got, 0
        while filled - at >= 4 and filled - at >= (size := 4 + _INT32.unpack_from(scratch, at)[0]):
            latencies.append(ended - sent.popleft())
            check_produced(scratch[at:])
            at += size
        scratch[: filled - at] = bytes(scratch[at:filled])
        filled -= at
    one.close()
    put(latencies[int(WARM_UP_S * per_s) :])


def librdkafka_client(bootstrap: str, topic: str, mb_per_s: float, seconds: float, put: Callable[[Any], None]) -> None:
    """Put the latencies, in seconds, reported by librdkafka with `linger.ms=0`."""
    from confluent_kafka import Producer

    latencies: list[float] = []

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            raise RuntimeError(str(error))
        latencies.append(message.latency())

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0, "socket.nagle.disable": True})
    producer.list_topics(topic, 10)
    value = os.urandom(RECORD_BYTES)
    per_s = mb_per_s * 1e6 / RECORD_BYTES
    started = time.perf_counter()
    warm = int(WARM_UP_S * per_s)
    for number in range(warm + int(per_s * seconds)):
        while (pause := started + number / per_s - time.perf_counter()) > 0:
            producer.poll(pause)
        producer.produce(topic, value, on_delivery=delivered, partition=0)
        producer.poll(0)
    flush(producer)
    put(latencies[warm:])


def give_files(tidelog: TidelogProcess) -> None:
    """Have the WAL create its files and recycle them after uploads."""
    in_process(replay_produce, ("127.0.0.1", tidelog.port), TOPIC, 1, RECORD_BYTES, 1_000_000, 5, FILL_S)
    settle(tidelog.broker_pid())


def figures(runs: Sequence[Sequence[float]]) -> dict[str, Spread]:
    """Percentiles of each run in ms, as medians over the runs."""
    return {name: Spread.of(percentile(run, part) * 1e3 for run in runs) for name, part in PARTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0 if quick() else 5.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mb-per-s", type=float, default=5.0)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--cores", choices=("pinned", "shared"), default="pinned")
    parser.add_argument("--dir", default=None, help="where the WAL and the bare disk write")
    args = parser.parse_args()
    per_s = args.mb_per_s * 1e6 / args.batch_bytes
    server, client = ({0}, {1}) if args.cores == "pinned" else (None, None)
    with contextlib.ExitStack() as stack:
        path: Path = stack.enter_context(directory(args.dir))
        disk = RawDisk(path, 256 << 20)
        stack.callback(disk.close)
        host, port = stack.enter_context(bare_server(cores=server))
        tidelog = stack.enter_context(broker(path / "data", SETTINGS, bucket_in_memory=True, cores=server))
        create_topic(tidelog.bootstrap, TOPIC, 1)
        give_files(tidelog)
        address = ("127.0.0.1", tidelog.port)
        load = (TOPIC, args.batch_bytes, per_s, args.seconds)
        slow = (TOPIC, args.mb_per_s, args.seconds)

        def on_disk() -> list[float]:
            with on_cores(server):
                return disk.latencies(args.batch_bytes, per_s, args.seconds)

        found = interleaved(
            args.runs,
            raw=on_disk,
            broker=lambda: in_process(raw_client, address, *load, cores=client),
            bare=lambda: in_process(raw_client, (host, port), *load, cores=client),
            librdkafka=lambda: in_process(librdkafka_client, tidelog.bootstrap, *slow, cores=client),
            librdkafka_bare=lambda: in_process(librdkafka_client, f"{host}:{port}", *slow, cores=client),
        )
    of = {name: figures(runs) for name, runs in found.items()}
    for name, parts in of.items():
        print(f"  {name:16s} " + ", ".join(f"{part} {spread.text('ms', 2)}" for part, spread in parts.items()))
    for part in PARTS:
        ratio = of["broker"][part].median / of["raw"][part].median
        goal = GOALS.get(part)
        row(
            f"produce latency at {args.mb_per_s:g} MB/s, {part}",
            of["broker"][part].text("ms", 2),
            limit=f"fdatasync {of['raw'][part].text('ms', 2)}",
            ratio=f"{ratio:.2f}",
            goal=f"≤ {goal}" if goal else "",
            holds=None if goal is None else ratio <= goal,
        )
        floor = of["raw"][part].median + of["bare"][part].median
        row(
            f"the same, {part}, of what disk and socket take without a broker",
            of["broker"][part].text("ms", 2),
            limit=f"fdatasync + bare socket {floor:.2f} ms",
            ratio=f"{of['broker'][part].median / floor:.2f}",
        )
        row(
            f"librdkafka latency at {args.mb_per_s:g} MB/s, {part}",
            of["librdkafka"][part].text("ms", 2),
            limit=f"at the bare socket {of['librdkafka_bare'][part].text('ms', 2)}",
        )


if __name__ == "__main__":
    main()
