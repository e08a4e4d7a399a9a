"""A cold read of history from the bucket by one reader, compared with raw concurrent GETs of the same objects.

    python -m bench.cold_read [--gb 5] [--store embedded|minio|both] [--runs 3] [--record-bytes 16384] [--readers 1]

Objects of 64 MiB with one stream are put into the embedded store (a directory) and into MinIO. `raw` reads them in
ranges of 4 MiB, 16 at a time, with the same client (`bench.limit_s3`) without the broker's limit of concurrent
requests, and discards the bytes: this is the limit of the bucket, its client and this machine. `cold` is
`BlockReader.read` in steps of 1 MiB, as for Fetch: index, read-ahead, checksums, records. Both alternate in the same
process, and the files are dropped from the page cache before each run (`posix_fadvise`), so that the limit is the disk;
`--warm` keeps them there.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import random
import time
from collections.abc import Awaitable, Callable

import uvloop

from bench._bucket import KINDS, Bucket, bucket, drop_page_cache
from bench._common import Spread, quick, row, say_new_pages
from bench.limit_s3 import get_all
from tidelog.runtime import memory
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.cpu_time import SystemCpu
from tidelog.storage.bucket.open import open_backend, open_store
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.commits import ObjectKind, ObjectSlice
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.writer import build_object
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.reads.throttle import ColdThrottle
from tidelog.storage.records import StreamEntry
from tidelog.storage.settings import CacheSettings

CLUSTER = "bench"
OBJECT_BYTES = 64 << 20
FETCH_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10
CACHE = CacheSettings()
GOAL = 0.8


class History:
    """The objects of some streams, as in the metadata."""

    def __init__(self) -> None:
        self.slices: dict[int, list[ObjectSlice]] = {}
        self.next_id = 1

    def check_current(self) -> None:
        """See `ObjectManager.check_current`."""

    async def catch_up(self) -> None:
        """See `ObjectManager.catch_up`."""

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        """See `ObjectManager.resolve`."""
        return stream_id, end_offset

    def find_objects(self, stream_id: int, start: int, end: int, limit: int) -> list[ObjectSlice]:
        """See `ObjectManager.find_objects`."""
        found: list[ObjectSlice] = []
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
            records = [StreamEntry(offset + n, 1, noise) for n in range(count)]
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
    """GETs of ranges; the bytes are discarded."""
    objects = [(object_key(CLUSTER, one.object_id), one.size) for part in history.slices.values() for one in part]
    return await get_all(store, objects)


async def cold(store: ObjectStore, history: History, cache: CacheSettings = CACHE) -> int:
    """Read each stream from its start to its end, one reader per stream."""
    reader = BlockReader(
        store=store,
        objects=history,  # type: ignore[arg-type]  # reading is all it does here
        clock=SystemClock(),
        cluster_id=CLUSTER,
        cache_bytes=cache.block_bytes,
        in_flight_bytes=cache.cold_in_flight_bytes,
        throttle=ColdThrottle(cache.cold_busy_share, SystemClock(), SystemCpu()),
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


async def timed(work: Callable[[], Awaitable[int]]) -> tuple[float, float]:
    """Return MB/s and CPU seconds per GB of this process."""
    started, cpu = time.perf_counter(), time.process_time()
    size = await work()
    seconds = time.perf_counter() - started
    return size / 1e6 / seconds, (time.process_time() - cpu) / (size / 1e9)


async def measure(one: Bucket, args: argparse.Namespace) -> None:
    """Fill a store, and print the medians."""
    opening = (one.s3, one.data_dir, SystemClock(), random.Random(1))
    bare, store = open_backend(*opening), open_store(*opening)
    if one.s3.endpoint:
        await store.probe()
    history = History()
    for stream_id in range(1, args.readers + 1):
        await history.fill(store, stream_id, int(args.gb * 1e9) // args.readers, args.record_bytes)
    figures: dict[str, list[tuple[float, float]]] = {"raw": [], "cold": []}
    profile = cProfile.Profile() if args.profile else None
    for _ in range(args.runs):
        for what, work in (("raw", lambda: raw(bare, history)), ("cold", lambda: cold(store, history))):
            if not args.warm:
                drop_page_cache(one.files)
            if profile is not None and what == "cold":
                profile.enable()
            figures[what].append(await timed(work))
            if profile is not None and what == "cold":
                profile.disable()
                profile.dump_stats(args.profile)
    await bare.close()
    await store.close()
    speeds = {what: Spread.of(speed for speed, _ in runs) for what, runs in figures.items()}
    costs = {what: Spread.of(cpu for _, cpu in runs) for what, runs in figures.items()}
    ratio = speeds["cold"].median / speeds["raw"].median
    row(
        f"cold read of {args.gb:g} GB, {one.name}",
        f"{speeds['cold'].text('MB/s')}, {costs['cold'].median:.2f} CPU s/GB",
        limit=f"concurrent GETs {speeds['raw'].text('MB/s')}, {costs['raw'].median:.2f} CPU s/GB",
        ratio=f"{ratio:.2f}",
        goal="≥ 0.8",
        holds=ratio >= GOAL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5 if quick() else 5, help="the goal is for 5; they lie on disk")
    parser.add_argument("--store", choices=(*KINDS, "both"), default="both")
    parser.add_argument("--runs", type=int, default=2 if quick() else 3)
    parser.add_argument("--readers", type=int, default=1, help="streams, each read by one reader at the same time")
    parser.add_argument("--record-bytes", type=int, default=16_384, help="size of a stream append (a record batch)")
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--profile", help="write the cold run's cProfile to this file")
    parser.add_argument("--dir", help="where the objects go (default: a temporary folder)")
    args = parser.parse_args()
    say_new_pages()
    memory.tune()  # as the serving process does
    for name in KINDS:
        if args.store in (name, "both"):
            with bucket(name, args.dir) as one:
                uvloop.run(measure(one, args))


if __name__ == "__main__":
    main()
