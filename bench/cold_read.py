"""A cold read of history from the bucket, by one reader, against raw concurrent GETs of the same objects.

    python bench/cold_read.py [--gb 1] [--store embedded|minio|both] [--runs 3] [--record-bytes 16384] [--readers 1]

Objects of 64 MiB with one stream are put into the embedded store (a directory) and into MinIO
(`localstack/serve.py minio`). `raw` asks for them in ranges of 4 MiB, 16 at a time, and throws the bytes away: that is
what the bucket, its client and this machine can do. `cold` is `BlockReader.read` in steps of 1 MiB, as Fetch asks:
index, read-ahead, checksums, records. Both take turns in the same process, and the embedded store's files are dropped
from the page cache before each run (`posix_fadvise`), so that its limit is the disk; `--warm` leaves them there.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from runtime.clock import SystemClock
from storage.block_reader import BlockReader
from storage.managers import ObjectKind, ObjectSlice
from storage.object_key import object_key
from storage.object_store import ObjectStore
from storage.object_writer import build_object
from storage.open_store import EMBEDDED_BUCKET, open_store
from storage.records import StreamRecord
from storage.settings import CacheSettings, S3Settings

CLUSTER = "bench"
OBJECT_BYTES = 64 << 20
RAW_GET_BYTES = 4 << 20
RAW_IN_FLIGHT = 16
FETCH_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10
ROOT = Path(__file__).resolve().parents[1]


class History:
    """The objects of some streams, as the metadata knows them."""

    def __init__(self) -> None:
        self.slices: dict[int, list[ObjectSlice]] = {}
        self.next_id = 1

    def find_objects(self, stream_id: int, start: int, end: int, limit: int) -> list[ObjectSlice]:
        """See `ObjectManager.find_objects`."""
        found = []
        first = next((n for n, one in enumerate(self.slices[stream_id]) if one.end_offset > start), 0)
        for one in self.slices[stream_id][first:]:
            if one.start_offset >= end or len(found) == limit:
                break
            found.append(one)
        return found

    async def fill(self, store: ObjectStore, stream_id: int, size: int, record_bytes: int) -> None:
        """Put `size` bytes of a stream."""
        slices = self.slices.setdefault(stream_id, [])
        noise = random.Random(1).randbytes(record_bytes)
        offset = 0
        while size >= record_bytes:
            count = min(size, OBJECT_BYTES) // record_bytes
            records = [StreamRecord(offset + n, 1, noise) for n in range(count)]
            built = build_object(
                object_id=self.next_id,
                kind=ObjectKind.STREAM,
                cluster_id=CLUSTER,
                created_ms=0,
                parts=[(stream_id, records)],
                block_bytes=BLOCK_BYTES,
            )
            await store.put(object_key(CLUSTER, self.next_id), built.body)
            slices.append(ObjectSlice(self.next_id, ObjectKind.STREAM, built.size, offset, offset + count))
            offset += count
            size -= count * record_bytes
            self.next_id += 1


async def raw(store: ObjectStore, history: History) -> int:
    """GETs of ranges, `RAW_IN_FLIGHT` at a time; the bytes are thrown away."""
    ranges = [
        (object_key(CLUSTER, one.object_id), start, min(start + RAW_GET_BYTES, one.size))
        for slices in history.slices.values()
        for one in slices
        for start in range(0, one.size, RAW_GET_BYTES)
    ]
    pending = iter(ranges)

    async def worker() -> int:
        size = 0
        for key, start, end in pending:
            (data,) = await store.get_ranges(key, [(start, end)])
            size += len(data)
        return size

    return sum(await asyncio.gather(*(worker() for _ in range(RAW_IN_FLIGHT))))


async def cold(store: ObjectStore, history: History, cache: CacheSettings) -> int:
    """Each stream read from its start to its end, one reader a stream."""
    reader = BlockReader(
        store=store,
        objects=history,  # type: ignore[arg-type]  # reading is all it does here
        clock=SystemClock(),
        cluster_id=CLUSTER,
        cache_bytes=cache.block_bytes,
        in_flight_bytes=cache.cold_in_flight_bytes,
    )

    async def replay(stream_id: int) -> int:
        offset, end = 0, history.slices[stream_id][-1].end_offset
        while offset < end:
            records = reader.read_cached(stream_id, offset, end, FETCH_BYTES)
            if records is None:
                records = await reader.read(stream_id, offset, end, FETCH_BYTES)
            offset = records[-1].base_offset + records[-1].count
        return sum(one.size for one in history.slices[stream_id])

    size = sum(await asyncio.gather(*map(replay, history.slices)))
    await reader.close()
    return size


def drop_page_cache(directory: Path) -> None:
    """Ask the kernel to forget the files under `directory`, which are on disk already."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


async def timed(work: Callable[[], Awaitable[int]]) -> tuple[float, float]:
    """MB/s and CPU seconds a GB of this process."""
    started, cpu = time.perf_counter(), time.process_time()
    size = await work()
    seconds = time.perf_counter() - started
    return size / 1e6 / seconds, (time.process_time() - cpu) / (size / 1e9)


async def measure(name: str, s3: S3Settings, directory: Path, args: argparse.Namespace) -> None:
    """Fill a store, and print the medians."""
    store = open_store(s3, directory, SystemClock(), random.Random(1))
    if s3.endpoint:
        await store.probe()
    history = History()
    for stream_id in range(1, args.readers + 1):
        await history.fill(store, stream_id, int(args.gb * 1e9) // args.readers, args.record_bytes)
    files = directory / EMBEDDED_BUCKET if not s3.endpoint else directory
    figures: dict[str, list[tuple[float, float]]] = {"raw": [], "cold": []}
    profile = cProfile.Profile() if args.profile else None
    for _ in range(args.runs):
        if not args.warm:
            drop_page_cache(files)
        figures["raw"].append(await timed(lambda: raw(store, history)))
        if not args.warm:
            drop_page_cache(files)
        if profile is not None:
            profile.enable()
        figures["cold"].append(await timed(lambda: cold(store, history, CacheSettings())))
        if profile is not None:
            profile.disable()
            profile.dump_stats(args.profile)
    await store.close()
    speeds = {}
    for what, runs in figures.items():
        speeds[what] = statistics.median(speed for speed, _ in runs)
        spread = f"{min(speed for speed, _ in runs):,.0f}–{max(speed for speed, _ in runs):,.0f}"
        cpu = statistics.median(cpu for _, cpu in runs)
        print(f"{name:9s} {what:5s} {speeds[what]:7,.0f} MB/s ({spread}), {cpu:.2f} CPU s/GB", flush=True)
    print(f"{name:9s} cold / raw = {speeds['cold'] / speeds['raw']:.2f} (goal 0.80)", flush=True)


def with_minio(args: argparse.Namespace, directory: Path) -> None:
    """Measure against a MinIO that lives as long as the measurement."""
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "tidelog", "AWS_SECRET_ACCESS_KEY": "tidelog-secret"}
    server = subprocess.Popen(
        [sys.executable, ROOT / "localstack" / "serve.py", "minio", "--dir", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if "endpoint=" not in line:
            print("minio     cannot be run on this machine", flush=True)
            return
        s3 = S3Settings(
            endpoint=line.split("endpoint=")[1].strip(),
            bucket="bench",
            access_key_id="tidelog",
            secret_access_key="tidelog-secret",
        )
        uvloop.run(measure("minio", s3, directory, args))
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--store", choices=("embedded", "minio", "both"), default="both")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--readers", type=int, default=1, help="streams, each read by one reader at the same time")
    parser.add_argument("--record-bytes", type=int, default=16_384, help="size of a stream append (a record batch)")
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--profile", help="write the cold run's cProfile to this file")
    parser.add_argument("--dir", help="where the objects go (default: a temporary folder)")
    args = parser.parse_args()
    for name in ("embedded", "minio"):
        if args.store in (name, "both"):
            with tempfile.TemporaryDirectory(dir=args.dir) as directory:
                if name == "minio":
                    with_minio(args, Path(directory))
                else:
                    uvloop.run(measure(name, S3Settings(), Path(directory), args))


if __name__ == "__main__":
    main()
