"""What the WAL's tests share: small settings, a reader of what recovers, waiting with a deadline."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from msgspec import structs

from tidelog.runtime.disk import Disk
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import Wal, WalRecord
from tidelog.storage.wal.disk.wal import DiskWal

SEGMENT = 8192


class WalChanges(TypedDict, total=False):
    """What a test sets otherwise than `small` does."""

    flush: Literal["sync", "async"]
    flush_interval_ms: int
    segment_bytes: int
    max_bytes: int
    max_record_bytes: int
    s3_batch_min_ms: int
    s3_batch_max_ms: int
    s3_batch_bytes: int
    s3_in_flight: int


def small(**changes: Unpack[WalChanges]) -> WalSettings:
    values = WalSettings(segment_bytes=SEGMENT, max_bytes=8 * SEGMENT, max_record_bytes=2 * SEGMENT)
    return structs.replace(values, **changes)


def make_wal(disk: Disk, **changes: Unpack[WalChanges]) -> DiskWal:
    return DiskWal(disk, small(**changes), rng=random.Random(7))


async def recovered(wal: DiskWal) -> list[WalRecord]:
    records: list[WalRecord] = []
    await wal.recover(records.append)
    return records


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def durable(wal: Wal) -> None:
    end = wal.end_offset
    await until(lambda: wal.durable_offset >= end)


async def append(wal: DiskWal, base: int, payload: bytes, stream: int = 1) -> int:
    """Append, waiting while there is no room."""
    await wal.writable(len(payload))
    return wal.append(StreamAppend(stream, 1, base, 1, [payload]))


def flip_bit(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
