"""The limits of a bucket, its client and this machine: bare puts, conditional puts, and concurrent GETs of ranges.

    python -m bench.limit_s3 [--store embedded|minio|both] [--client aiobotocore|obstore] [--mb 256]

The reference for other measurements of the bucket. The only code of Tidelog involved is the interface `ObjectStore`,
which retries and counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence

import uvloop

from bench._bucket import KINDS, Bucket, bucket
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.open import open_backend
from tidelog.storage.bucket.store import ObjectStore

RANGE_BYTES = 4 << 20
RANGES_IN_FLIGHT = 16


async def put_latencies_s(store: ObjectStore, prefix: str, sizes: Sequence[int], *, if_absent: bool) -> list[float]:
    """Sequential puts, seconds each. The objects are kept."""
    body = random.Random(1).randbytes(max(sizes))
    found = []
    for number, size in enumerate(sizes):
        data = body[:size]
        started = time.perf_counter()
        await store.put(f"{prefix}/{number:08d}", (data,), if_absent=if_absent)
        found.append(time.perf_counter() - started)
    return found


async def put_mb_per_s(store: ObjectStore, prefix: str, size: int, total: int, in_flight: int) -> float:
    """Puts of `size` bytes, `in_flight` at a time, `total` bytes."""
    body = random.Random(2).randbytes(size)
    numbers = iter(range(max(1, total // size)))
    done = 0

    async def worker() -> None:
        nonlocal done
        for number in numbers:
            await store.put(f"{prefix}/{number:08d}", (body,))
            done += size

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return done / 1e6 / (time.perf_counter() - started)


async def get_all(
    store: ObjectStore,
    objects: Sequence[tuple[str, int]],
    range_bytes: int = RANGE_BYTES,
    in_flight: int = RANGES_IN_FLIGHT,
) -> int:
    """GETs of ranges of objects (key, size), `in_flight` at a time; the bytes are discarded. Return their number."""
    pending = iter(
        [(key, start, min(start + range_bytes, size)) for key, size in objects for start in range(0, size, range_bytes)]
    )

    async def worker() -> int:
        got = 0
        for key, start, end in pending:
            (data,) = await store.get_ranges(key, [(start, end)])
            got += len(data)
        return got

    return sum(await asyncio.gather(*(worker() for _ in range(in_flight))))


async def measure(one: Bucket, args: argparse.Namespace) -> None:
    store = open_backend(one.s3, one.data_dir, SystemClock(), random.Random(1))
    await store.probe()
    for size, count in ((1 << 10, 100), (64 << 10, 60), (1 << 20, 30), (8 << 20, 8)):
        plain, conditional = [], []
        for turn in range(4):
            sizes = [size] * (count // 4)
            plain += await put_latencies_s(store, f"plain/{size}/{turn}", sizes, if_absent=False)
            conditional += await put_latencies_s(store, f"new/{size}/{turn}", sizes, if_absent=True)
        print(
            f"{one.name:9s} put of {size >> 10:5d} KiB: p50 {statistics.median(plain) * 1e3:6.2f} ms, conditional"
            f" {statistics.median(conditional) * 1e3:6.2f} ms ({min(conditional) * 1e3:.2f}–"
            f"{max(conditional) * 1e3:.2f})",
            flush=True,
        )
    total = args.mb << 20
    for size in (1 << 20, 16 << 20):
        speed = await put_mb_per_s(store, f"many/{size}", size, total, 8)
        print(f"{one.name:9s} puts of {size >> 20:2d} MiB, 8 at a time: {speed:7,.0f} MB/s", flush=True)
    objects = [(f"many/{16 << 20}/{number:08d}", 16 << 20) for number in range(max(1, total // (16 << 20)))]
    for size, in_flight in ((256 << 10, 16), (RANGE_BYTES, 4), (RANGE_BYTES, RANGES_IN_FLIGHT)):
        started, cpu = time.perf_counter(), time.process_time()
        got = await get_all(store, objects, size, in_flight)
        took = time.perf_counter() - started
        print(
            f"{one.name:9s} GETs of {size >> 10:5d} KiB, {in_flight:2d} at a time: {got / 1e6 / took:7,.0f} MB/s,"
            f" {(time.process_time() - cpu) / (got / 1e9):.2f} CPU s/GB of the client",
            flush=True,
        )
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=(*KINDS, "both"), default="both")
    parser.add_argument("--client", choices=("aiobotocore", "obstore"), default="obstore")
    parser.add_argument("--mb", type=int, default=256, help="MiB written and read for the throughputs")
    parser.add_argument("--dir", help="where the objects go (default: a temporary folder)")
    args = parser.parse_args()
    for kind in KINDS:
        if args.store in (kind, "both"):
            with bucket(kind, args.dir, client=args.client) as one:
                uvloop.run(measure(one, args))


if __name__ == "__main__":
    main()
