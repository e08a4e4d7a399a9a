"""Acknowledgements of the WAL in the bucket, compared with bare puts of the same objects at the same times.

    python -m bench.wal_s3 [--store embedded|minio|distant] [--seconds 3] [--rounds 3] [--load single|5|half]

`distant` is a bucket in memory with network latencies (25 ms and a long tail).

Loads: `single` is sequential appends of 1 KiB; `5` is 5 MB/s in appends of 16 KiB, evenly spaced; `half` is half of the
throughput of eight concurrent puts of 1 MiB in this bucket, in appends of 64 KiB. Each round of the WAL is followed by
one of bare puts with the sizes and start times of the WAL's puts, so that the bucket is equally busy. An
acknowledgement may take 1.5 times a bare put and half a batch interval (the goal); the batch interval is the measured
time between two objects of the WAL.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import uvloop

from bench._bucket import KINDS, Bucket, bucket
from bench._common import percentile, quick, row
from bench.limit_s3 import put_mb_per_s
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.open import open_store
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.store import ObjectInfo, ObjectStore
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import WalFull
from tidelog.storage.wal.s3.wal import S3Wal

MOST_MB_PER_S = 80.0
"""A larger amount would measure the throttling of the disk behind the bucket."""
STORES = ("distant", *KINDS)
LOADS = ("single", "5", "half")


class Put(NamedTuple):
    """One recorded put."""

    began_s: float
    size: int
    took_s: float


class Recorder:
    """The WAL's store, which records every put."""

    def __init__(self, store: ObjectStore, puts: list[Put] | None = None) -> None:
        self._store = store
        self.puts: list[Put] = [] if puts is None else puts

    def for_purpose(self, purpose: Purpose) -> Recorder:
        """See `ObjectStore.for_purpose`."""
        return Recorder(self._store.for_purpose(purpose), self.puts)

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        started = time.perf_counter()
        info = await self._store.put(key, body, if_absent=if_absent)
        self.puts.append(Put(started, info.size, time.perf_counter() - started))
        return info

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class Distant(MemoryObjectStore):
    """A bucket in memory with the latency of a distant one: 25 ms, and a second per 80 MB, with a long tail."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(5)

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        size = sum(map(len, body))
        await asyncio.sleep((0.025 + size / 80e6) * self._rng.lognormvariate(0, 0.35))
        return await super().put(key, body, if_absent=if_absent)


class Figures(NamedTuple):
    """One load: the results of each round, in seconds."""

    acks: list[float]
    raw: list[float]
    intervals: list[float]
    puts: list[float]
    sizes: list[int]


class Load:
    """Appends at a rate and waits for them."""

    def __init__(self, wal: S3Wal, record_bytes: int, mb_per_s: float) -> None:
        self._wal = wal
        self._record_bytes = record_bytes
        self._rate = mb_per_s * 1e6 / record_bytes if mb_per_s else 0.0
        self._noise = random.Random(3).randbytes(record_bytes)
        self._pending: list[tuple[int, float]] = []
        self._head = 0
        self._offset = 0
        self._durable = asyncio.Event()
        self.acks: list[float] = []
        wal.set_on_durable(self._on_durable)

    def _on_durable(self, offset: int) -> None:
        now = time.perf_counter()
        while self._head < len(self._pending) and self._pending[self._head][0] <= offset:
            self.acks.append(now - self._pending[self._head][1])
            self._head += 1
        self._durable.set()

    def _append(self, due_s: float) -> None:
        end = self._wal.append(StreamAppend(1, 1, self._offset, 1, (self._noise,)))
        self._offset += 1
        self._pending.append((end, due_s))

    async def run(self, seconds: float) -> None:
        """Append for the given time, then wait for the rest. Latency counts from the due time of an append."""
        started = time.perf_counter()
        if not self._rate:
            while time.perf_counter() - started < seconds:
                self._durable.clear()
                self._append(time.perf_counter())
                await self._durable.wait()
            return
        count = int(seconds * self._rate)
        number = 0
        while number < count:
            now = time.perf_counter()
            while number < count and started + number / self._rate <= now:
                try:
                    self._append(started + number / self._rate)
                except WalFull:
                    await self._wal.writable(self._record_bytes)
                number += 1
            await asyncio.sleep(0.001)
        while self._head < len(self._pending):
            self._durable.clear()
            await self._durable.wait()


async def again(store: ObjectStore, prefix: str, puts: Sequence[Put], one_by_one: bool) -> list[float]:
    """Bare puts of the same sizes, started at the same times (or sequentially); return seconds each."""
    noise = random.Random(4).randbytes(max(one.size for one in puts))
    started, first = time.perf_counter(), min(one.began_s for one in puts)
    took: list[float] = []

    async def put(number: int, one: Put) -> None:
        if not one_by_one:
            await asyncio.sleep(max(0.0, started + one.began_s - first - time.perf_counter()))
        data = noise[: one.size]
        begun = time.perf_counter()
        await store.put(f"{prefix}/{number:08d}", (data,), if_absent=True)
        took.append(time.perf_counter() - begun)

    if one_by_one:
        for number, one in enumerate(puts):
            await put(number, one)
    else:
        await asyncio.gather(*(put(number, one) for number, one in enumerate(puts)))
    return took


async def measure_load(
    store: ObjectStore, name: str, record_bytes: int, mb_per_s: float, args: argparse.Namespace
) -> Figures:
    figures = Figures([], [], [], [], [])
    for turn in range(args.rounds + 1):
        recorder = Recorder(store)
        wal = S3Wal(
            recorder,  # type: ignore[arg-type]  # what it lacks it passes on
            WalSettings(kind="s3"),
            cluster_id=f"{name}-{turn}",
            replica_set_id=1,
            clock=SystemClock(),
            rng=random.Random(),
        )
        await wal.recover(lambda _record: None)
        await wal.begin_epoch(1)
        recorder.puts.clear()
        load = Load(wal, record_bytes, mb_per_s)
        await load.run(args.seconds if turn else 0.5)  # the first round warms up
        await wal.close()
        raw = await again(store.for_purpose(Purpose.WAL), f"raw/{name}-{turn}", recorder.puts, one_by_one=not mb_per_s)
        if turn:
            figures.acks.extend(load.acks)
            figures.raw.extend(raw)
            figures.puts.extend(one.took_s for one in recorder.puts)
            figures.sizes.extend(one.size for one in recorder.puts)
            if mb_per_s:
                begun = sorted(one.began_s for one in recorder.puts)
                figures.intervals.extend(b - a for a, b in itertools.pairwise(begun))
    return figures


def report(store: str, load: str, figures: Figures) -> None:
    ack, raw, put = (statistics.median(one) for one in (figures.acks, figures.raw, figures.puts))
    interval = statistics.median(figures.intervals) if figures.intervals else 0.0
    allowed = 1.5 * raw + interval / 2
    print(
        f"{store:9s} {load:9s} ack p99 {percentile(figures.acks, 0.99) * 1e3:6.1f} ms; the WAL's puts took"
        f" {put * 1e3:6.2f} ms, {statistics.median(figures.sizes) / 1024:.0f} KiB each, one every"
        f" {interval * 1e3:.1f} ms",
        flush=True,
    )
    row(
        f"WAL s3 ack p50, {store}, {load}",
        f"{ack * 1e3:.2f} ms",
        limit=f"bare put {raw * 1e3:.2f} ms, batch interval {interval * 1e3:.1f} ms",
        ratio=f"{ack / raw:.2f} × put; {ack / allowed:.2f} of what is allowed",
        goal="≤ 1.5 × put + ½ interval",
        holds=ack <= allowed,
    )


async def measure(store: ObjectStore, name: str, args: argparse.Namespace) -> None:
    await store.probe()
    for load in LOADS:
        if args.load not in ("all", load):
            continue
        if load == "single":
            figures = await measure_load(store, load, 1 << 10, 0.0, args)
            report(name, load, figures)
        elif load == "5":
            report(name, "5 MB/s", await measure_load(store, load, 16 << 10, 5.0, args))
        else:
            half = await put_mb_per_s(store, "limit", 1 << 20, 128 << 20, 8) / 2
            half = min(half, MOST_MB_PER_S)
            report(name, f"{half:.0f} MB/s", await measure_load(store, load, 64 << 10, half, args))
    await store.close()


async def measure_bucket(one: Bucket, args: argparse.Namespace) -> None:
    await measure(open_store(one.s3, one.data_dir, SystemClock(), random.Random(1)), one.name, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=(*STORES, "all"), default="all")
    parser.add_argument("--load", choices=(*LOADS, "all"), default="all")
    parser.add_argument("--seconds", type=float, default=1.0 if quick() else 2.0)
    parser.add_argument("--rounds", type=int, default=2 if quick() else 3)
    parser.add_argument("--dir", help="where the objects go (default: a temporary folder)")
    args = parser.parse_args()
    for kind in STORES:
        if args.store not in (kind, "all"):
            continue
        if kind == "distant":
            uvloop.run(measure(Distant(), kind, args))
            continue
        with bucket(kind, args.dir) as one:
            uvloop.run(measure_bucket(one, args))


if __name__ == "__main__":
    main()
