"""What one append to a partition log costs on the loop's thread, without disk and network.

Run: `python bench/partition_append.py [--batches N] [--records N] [--value-bytes N] [--partitions N]`. Prints
microseconds for an append of a plain and of an idempotent batch, and bytes resident for an idle open partition. The
storage keeps records in memory, so what is measured is the log: checks, CRC32C, sequences, bookkeeping.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from storage.record_batch import Record, build_batch
from stream.log_config import LogConfig
from tests.support.fake_storage import FakeClock, FakeWorld, Process


async def append_cost(batches: int, records: int, value_bytes: int, *, idempotent: bool) -> float:
    clock = FakeClock()
    log = await Process(FakeWorld(), clock).open(LogConfig())
    rows = [Record(0, clock.now_ms, b"key", bytes(value_bytes))] * records
    views = []
    for n in range(batches):
        fields = {"producer_id": 1, "producer_epoch": 0, "base_sequence": n * records} if idempotent else {}
        views.append(memoryview(bytearray(build_batch(rows, **fields))))
    gc.collect()
    started = time.perf_counter()
    for view in views:
        log.append(view)
    return (time.perf_counter() - started) / batches * 1e6


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
    for idempotent in (False, True):
        cost = await append_cost(args.batches, args.records, args.value_bytes, idempotent=idempotent)
        print(f"append, {'idempotent' if idempotent else 'plain':10}  {cost:6.2f} us a batch")
    print(f"open idle partition  {await idle_bytes(args.partitions):6.0f} bytes")


if __name__ == "__main__":
    asyncio.run(main())
