"""What the WAL's tests share: small settings, a reader of what recovers, waiting with a deadline."""

from __future__ import annotations

import asyncio
import random

from storage.settings import WalSettings
from storage.wal import WalRecord
from storage.wal_disk import DiskWal

SEGMENT = 8192


def small(**changes) -> WalSettings:
    values = {"segment_bytes": SEGMENT, "max_bytes": 8 * SEGMENT, "max_record_bytes": 2 * SEGMENT}
    return WalSettings(**{**values, **changes})


def make_wal(disk, **changes) -> DiskWal:
    return DiskWal(disk, small(**changes), rng=random.Random(7))


async def recovered(wal: DiskWal) -> list[WalRecord]:
    records: list[WalRecord] = []
    await wal.recover(records.append)
    return records


async def until(condition, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def durable(wal: DiskWal) -> None:
    end = wal.end_offset
    await until(lambda: wal.durable_offset >= end)


async def append(wal: DiskWal, base: int, payload: bytes, stream: int = 1) -> int:
    """Append, waiting while there is no room."""
    await wal.writable(len(payload))
    return wal.append(stream, 1, base, 1, [payload])


def flip_bit(path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
