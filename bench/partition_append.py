"""The cost of one append to a partition log on the event loop's thread, without disk and network.

Run: `python -m bench.partition_append [--batches N] [--records N] [--value-bytes N] [--partitions N]`. Prints
microseconds of the loop's thread for an append of a plain and of an idempotent batch: with a storage that does nothing
(checks, CRC32C, sequences, bookkeeping) and with the real one and a WAL in memory (including log cache, upload planning
and confirmation); and bytes resident for an idle open partition.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.fake_objects import FakeObjects
from tests.support.fake_storage import FakeClock, FakeManager, FakeWorld, Process
from tidelog.batch.batch import Record, build_batch
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.inputs import ReplicaSetData
from tidelog.storage.settings import CacheSettings, StorageSettings, UploadSettings, WalSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.memory import MemoryWal
from tidelog.stream.log_config import LogConfig
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_log import LedPartition, PartitionLog


async def open_on_real_storage(clock: FakeClock) -> tuple[PartitionLog, Storage]:
    storage = Storage(
        ReplicaSetData(
            "bench", 1, MemoryWal(WalSettings(max_bytes=1 << 40)), MemoryObjectStore(clock), FakeObjects(clock=clock)
        ),
        StorageSettings(UploadSettings(size_bytes=1 << 40, age_ms=1 << 40), CacheSettings(log_bytes=1 << 40)),
        clock,
        random.Random(1),
    )
    await storage.recover()
    await storage.start(1)
    opened = [OpenedStream(stream, 1, 0, 0, 0) for stream in range(4)]
    log = await PartitionLog.open(
        led=LedPartition("t", bytes(16), 0, 1),
        streams=(opened[0], opened[1], opened[2], opened[3]),
        storage=storage,
        manager=FakeManager(FakeWorld()),  # type: ignore[arg-type]
        config=LogConfig(),
        clock=clock,
    )
    return log, storage


async def append_cost(batches: int, records: int, value_bytes: int, *, idempotent: bool, real: bool) -> float:
    clock = FakeClock()
    storage = None
    if real:
        log, storage = await open_on_real_storage(clock)
    else:
        log = await Process(FakeWorld(), clock).open(LogConfig())
    rows = [Record(0, clock.now_ms, b"key", bytes(value_bytes))] * records
    views = []
    for n in range(batches):
        producer_id, producer_epoch, base_sequence = (1, 0, n * records) if idempotent else (-1, -1, -1)
        batch = build_batch(rows, producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence)
        views.append(memoryview(bytearray(batch)))
    gc.collect()
    started = time.perf_counter()
    for n, view in enumerate(views):
        result = log.append(view)
        if n % 64 == 0:
            await asyncio.sleep(0)  # let what was appended be confirmed, as in the broker
    if storage is not None:
        await log.wait_acked(result.wal_end)
    elapsed = time.perf_counter() - started
    if storage is not None:
        await storage.close(upload=False)
    return elapsed / batches * 1e6


async def idle_bytes(partitions: int) -> float:
    clock, world = FakeClock(), FakeWorld()
    process = Process(world, clock)
    logs = []
    for n in range(partitions):  # each was used and closed cleanly before
        log = await process.open(LogConfig(), first_stream=4 * n)
        log.append(memoryview(bytearray(build_batch([Record(0, clock.now_ms, b"k", b"v")]))))
        logs.append(log)
    for log in logs:
        await log.close()
    process = Process(world, clock)
    del logs, log
    gc.collect()
    config = LogConfig()
    tracemalloc.start()
    logs = [await process.open(config, first_stream=4 * n) for n in range(partitions)]
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(logs) == partitions
    return size / partitions


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=50_000)
    parser.add_argument("--records", type=int, default=1)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=2_000)
    args = parser.parse_args()
    for real in (False, True):
        for idempotent in (False, True):
            cost = await append_cost(args.batches, args.records, args.value_bytes, idempotent=idempotent, real=real)
            where = "real storage, memory WAL" if real else "log alone"
            print(f"append, {'idempotent' if idempotent else 'plain':10} {where:25} {cost:6.2f} us a batch")
    print(f"open idle partition  {await idle_bytes(args.partitions):6.0f} bytes")


if __name__ == "__main__":
    asyncio.run(main())
