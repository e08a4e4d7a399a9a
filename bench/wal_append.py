"""Appends per second and latency of the disk WAL, compared with the bare disk in the same run.

    python -m bench.wal_append [--dir DIR] [--size 4096] [--in-flight 64] [--seconds 5] [--flush sync|async]

The bare disk is one thread that writes the same bytes to a zero-filled file with `pwritev` and `fdatasync`, in groups
of `in-flight` records: the upper bound of group commit. The two alternate every half second, because a disk has bursts
and throttling, and may be shared. CPU per append is that of the event loop's thread, including the load generator.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import random
import time
from collections import deque
from pathlib import Path

import uvloop

from bench._programs import scratch_directory
from tidelog.runtime.disk import FileDisk
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import MIB, WalSettings
from tidelog.storage.wal.base import WalFull
from tidelog.storage.wal.disk.wal import DiskWal

RAW_FILE_BYTES = 64 * MIB
TURN_S = 0.5


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] * 1e3


class Raw:
    """The bare disk."""

    def __init__(self, directory: Path, size: int, group: int) -> None:
        self.group = group
        payload, header = os.urandom(size), bytes(64)
        self.buffers = [part for _ in range(group) for part in (header, payload)]
        self.length = group * (64 + size)
        self.took: list[float] = []
        self.elapsed = 0.0
        self.file = (directory / "raw").open("w+b")
        self.file.write(bytes(RAW_FILE_BYTES))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.at = 0

    def run(self, seconds: float) -> None:
        fd, started = self.file.fileno(), time.perf_counter()
        while (now := time.perf_counter()) - started < seconds:
            if self.at + self.length > RAW_FILE_BYTES:
                self.at = 0
            for first in range(0, len(self.buffers), 1024):
                self.at += os.pwritev(fd, self.buffers[first : first + 1024], self.at)
            os.fdatasync(fd)
            self.took.append(time.perf_counter() - now)
        self.elapsed += time.perf_counter() - started

    @property
    def rate(self) -> float:
        return len(self.took) * self.group / self.elapsed


class Load:
    """Keeps `in_flight` appends in flight from one task, like a busy broker."""

    def __init__(self, wal: DiskWal, size: int, in_flight: int) -> None:
        self.wal = wal
        self.payload = os.urandom(size)
        self.in_flight = in_flight
        self.waiting: deque[tuple[int, float]] = deque()
        self.latencies: list[float] = []
        self.base = 0
        self.full = 0
        self.room = asyncio.Event()
        wal.set_on_durable(self.on_durable)

    def on_durable(self, offset: int) -> None:
        self.wal.note_confirmed(offset)
        now = time.perf_counter()
        waiting = self.waiting
        while waiting and waiting[0][0] <= offset:
            self.latencies.append(now - waiting.popleft()[1])
        self.room.set()

    async def run(self, seconds: float) -> tuple[float, float]:
        """Elapsed seconds and CPU seconds of the loop's thread."""
        wal, payload = self.wal, self.payload
        started, cpu = time.perf_counter(), time.thread_time()
        next_trim = wal.end_offset
        while time.perf_counter() - started < seconds:
            while len(self.waiting) < self.in_flight:
                try:
                    end = wal.append(StreamAppend(1, 1, self.base, 1, (payload,)))
                except WalFull:
                    self.full += 1
                    await wal.writable(len(payload))
                    continue
                self.waiting.append((end, time.perf_counter()))
                self.base += 1
            self.room.clear()
            await self.room.wait()
            if wal.durable_offset > next_trim:
                await wal.trim(wal.durable_offset)
                next_trim = wal.durable_offset + 64 * MIB
        return time.perf_counter() - started, time.thread_time() - cpu


async def measure(directory: Path, arguments: argparse.Namespace) -> None:
    raw = Raw(directory, arguments.size, arguments.in_flight)
    disk = FileDisk(directory / "wal")
    wal = DiskWal(disk, WalSettings(flush=arguments.flush), rng=random.Random(1))
    await wal.recover(lambda _record: None)
    await wal.begin_epoch(1)
    load = Load(wal, arguments.size, arguments.in_flight)
    await load.run(TURN_S)  # warm up: spares, caches
    load.latencies.clear()
    appends, groups, elapsed, cpu = load.base, disk.groups, 0.0, 0.0
    profile = cProfile.Profile() if arguments.profile else None
    for _ in range(max(1, round(arguments.seconds / TURN_S))):
        raw.run(TURN_S)
        if profile is not None:
            profile.enable()
        turn_elapsed, turn_cpu = await load.run(TURN_S)
        if profile is not None:
            profile.disable()
        elapsed, cpu = elapsed + turn_elapsed, cpu + turn_cpu
    appends, groups = load.base - appends, disk.groups - groups
    await wal.close()
    await disk.close()
    raw.file.close()
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    report(raw, load.latencies, appends, groups, elapsed, cpu)
    print(f"     the WAL waited {load.full} times for room in the next file")


def report(raw: Raw, latencies: list[float], appends: int, groups: int, elapsed: float, cpu: float) -> None:
    raw_p50, raw_p99 = percentile(raw.took, 0.5), percentile(raw.took, 0.99)
    p50, p99, rate = percentile(latencies, 0.5), percentile(latencies, 0.99), appends / elapsed
    print(f"disk {raw.rate:9,.0f} records/s  p50 {raw_p50:6.2f} ms  p99 {raw_p99:6.2f} ms  {raw.group} records a group")
    print(
        f"wal  {rate:9,.0f} appends/s  p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  {appends / groups:.1f} appends a group,"
        f" {cpu / appends * 1e6:.1f} µs of loop CPU an append"
    )
    print(f"wal / disk: rate {rate / raw.rate:.2f}, p50 {p50 / raw_p50:.2f}, p99 {p99 / raw_p99:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="where to write (default: the system's temporary directory)")
    parser.add_argument("--size", type=int, default=4096, help="payload bytes")
    parser.add_argument("--in-flight", type=int, default=64, help="appends under way")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--flush", choices=("sync", "async"), default="sync")
    parser.add_argument("--profile", action="store_true", help="print where the loop's thread spends its time")
    parser.add_argument("--uvloop", action="store_true", help="as the broker does")
    arguments = parser.parse_args()
    with scratch_directory(arguments.dir) as directory:
        if arguments.uvloop:
            uvloop.run(measure(directory, arguments))
        else:
            asyncio.run(measure(directory, arguments))


if __name__ == "__main__":
    main()
