"""The WAL that keeps only offsets."""

from __future__ import annotations

import asyncio

import pytest

from tests.storage.wal_harness import small, until
from tidelog.runtime.errors import Closed, Fenced, InvalidInput
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import Wal, WalFull
from tidelog.storage.wal.memory import MemoryWal


async def test_it_counts_offsets_as_the_disk_does() -> None:
    wal: Wal = MemoryWal(small())
    seen: list[int] = []
    wal.set_on_durable(seen.append)
    assert await wal.recover(lambda _record: None) == 0
    await wal.begin_epoch(1)
    end = wal.append(StreamAppend(1, 1, 0, 1, [b"abc", memoryview(b"d")]))
    assert end == 64 + 64 + 4
    assert wal.durable_offset == 64
    await until(lambda: wal.durable_offset == end)
    assert seen == [64, end]
    await wal.trim(end)
    assert wal.start_offset == end
    with pytest.raises(Fenced):
        await wal.begin_epoch(1)
    with pytest.raises(InvalidInput):
        wal.append(StreamAppend(1, 1, 0, 1, [bytes(100_000)]))
    await wal.close()
    with pytest.raises(Closed):
        wal.append(StreamAppend(1, 1, 0, 1, [b"x"]))


async def test_it_is_bounded_and_a_trim_makes_room() -> None:
    wal = MemoryWal(small(max_bytes=10_000))
    await wal.reset(1 << 40)
    await wal.begin_epoch(1)
    with pytest.raises(WalFull):
        for i in range(100):
            wal.append(StreamAppend(1, 1, i, 1, [bytes(1000)]))
    waiting = asyncio.create_task(wal.writable(1000))
    await asyncio.sleep(0)
    assert not waiting.done()
    await wal.trim(wal.durable_offset)
    await asyncio.wait_for(waiting, 60)
    wal.append(StreamAppend(1, 1, 9, 1, [bytes(1000)]))
