"""The two S3 clients, obstore and aiobotocore, under Tidelog's loads on a bucket.

    python -m bench.object_stores [--runs 3] [--mb 512]

Against a MinIO on this machine, alternating between the clients: `upload` puts objects of 64 MiB, four at a time, in
buffers of 256 KiB as the uploader does; `wal` creates objects of 16 KiB conditionally, 16 at a time; `cold` is a replay
by `BlockReader`; `gets` are bare GETs of 4 MiB, 16 at a time. CPU is that of this process, all threads. The stall is
the wake-up delay of a task on the same event loop that sleeps 1 ms: the delay of a producer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import uvloop

from bench._bucket import Bucket, bucket
from bench._common import Spread, percentile, quick, row
from bench.cold_read import CLUSTER, History, cold
from bench.limit_s3 import get_all
from tidelog.runtime import memory
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.open import open_store
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.objects.key import object_key
from tidelog.storage.settings import CacheSettings

CLIENTS = ("aiobotocore", "obstore")
UPLOAD_BYTES = 64 << 20
WAL_BYTES = 16 << 10
WAL_PUTS = 1000


class Run(NamedTuple):
    """One load by one client."""

    mb_per_s: float
    cpu_s_per_gb: float
    cpu_ms_per_request: float
    stall_p99_ms: float


async def timed(work: Callable[[], Awaitable[tuple[int, int]]]) -> Run:
    """Run `work`, which returns bytes and requests, beside a task that measures its wake-up delay."""
    late_s: list[float] = []

    async def watch() -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            late_s.append(time.perf_counter() - begun - 0.001)

    watcher = asyncio.ensure_future(watch())
    started, cpu = time.perf_counter(), time.process_time()
    size, requests = await work()
    took, used = time.perf_counter() - started, time.process_time() - cpu
    watcher.cancel()
    return Run(size / 1e6 / took, used / (size / 1e9), used / requests * 1e3, percentile(late_s, 0.99) * 1e3)


async def upload(store: ObjectStore, total: int) -> tuple[int, int]:
    """Objects as the uploader puts them."""
    view = store.for_purpose(Purpose.UPLOAD)
    block = random.Random(1).randbytes(256 << 10)
    numbers = iter(range(max(4, total // UPLOAD_BYTES)))
    count = 0

    async def worker() -> None:
        nonlocal count
        for number in numbers:
            await view.put(f"upload/{number:04d}", [block] * (UPLOAD_BYTES // len(block)))
            count += 1

    await asyncio.gather(*(worker() for _ in range(4)))
    return count * UPLOAD_BYTES, count


async def wal(store: ObjectStore, prefix: str) -> tuple[int, int]:
    """Small conditional creates."""
    view = store.for_purpose(Purpose.WAL)
    data = random.Random(2).randbytes(WAL_BYTES)
    numbers = iter(range(WAL_PUTS))

    async def worker() -> None:
        for number in numbers:
            await view.put(f"{prefix}/{number:06d}", (data,), if_absent=True)

    await asyncio.gather(*(worker() for _ in range(16)))
    return WAL_PUTS * WAL_BYTES, WAL_PUTS


async def measure(one: Bucket, args: argparse.Namespace) -> None:
    def opened(client: str) -> ObjectStore:
        settings = one.s3.__class__(**{**{f: getattr(one.s3, f) for f in one.s3.__struct_fields__}, "client": client})
        return open_store(settings, one.data_dir, SystemClock(), random.Random(1))

    stores = {client: opened(client) for client in CLIENTS}
    history = History()
    for store in stores.values():
        await store.probe()
    await history.fill(stores["obstore"], 1, args.mb << 20, 16_384)
    objects = [(object_key(CLUSTER, part.object_id), part.size) for part in history.slices[1]]

    async def replay(store: ObjectStore) -> tuple[int, int]:
        size = await cold(store, history, CacheSettings())
        return size, size >> 22

    async def gets(store: ObjectStore) -> tuple[int, int]:
        size = await get_all(store, objects)
        return size, size >> 22

    found: dict[tuple[str, str], list[Run]] = {}
    for turn in range(args.runs + 1):
        for client, store in stores.items():
            loads: dict[str, Callable[[], Awaitable[tuple[int, int]]]] = {
                "upload": partial(upload, store, args.mb << 20),
                "wal": partial(wal, store, f"wal/{client}/{turn}"),
                "cold": partial(replay, store),
                "gets": partial(gets, store),
            }
            for load, work in loads.items():
                run = await timed(work)
                if turn:  # the first round warms up
                    found.setdefault((load, client), []).append(run)
    for load in ("upload", "wal", "cold", "gets"):
        for client in CLIENTS:
            runs = found[load, client]
            speed = Spread.of(run.mb_per_s for run in runs)
            cost = Spread.of(run.cpu_s_per_gb for run in runs)
            each = Spread.of(run.cpu_ms_per_request for run in runs)
            stall = Spread.of(run.stall_p99_ms for run in runs)
            row(
                f"{client}, {load}",
                f"{speed.text('MB/s')}, {cost.median:.2f} CPU s/GB, {each.median:.2f} ms a request,"
                f" stall p99 {stall.median:.1f} ms",
            )
    for store in stores.values():
        await store.close()


def main() -> None:
    memory.tune()  # as the serving process does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1 if quick() else 3)
    parser.add_argument("--mb", type=int, default=256 if quick() else 512)
    parser.add_argument("--dir", help="where the objects go (default: a temporary folder)")
    args = parser.parse_args()
    with bucket("minio", args.dir, multipart_bytes=128 << 20) as one:
        uvloop.run(measure(one, args))


if __name__ == "__main__":
    main()
