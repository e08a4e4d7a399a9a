"""Waits that a time-out has ended leave nothing behind, however long what they waited for does not come."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from tests.storage.wal_harness import small
from tests.support.storage_world import World
from tidelog.runtime.errors import Overloaded
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalFull
from tidelog.storage.wal.memory import MemoryWal

WAITS = 300


def futures() -> int:
    gc.collect()
    return sum(isinstance(each, asyncio.Future) for each in gc.get_objects())


async def waits_leave_nothing(wait: Callable[[], Awaitable[None]]) -> bool:
    before = futures()
    for _ in range(WAITS):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await wait()
    return futures() - before < WAITS // 10


async def test_for_room_in_the_log_cache_while_the_bucket_takes_nothing() -> None:
    world = World(size_bytes=1 << 20)
    world.cache.log_bytes = 20_000
    await world.boot([1])
    world.store.gate = asyncio.Event()
    with pytest.raises(Overloaded):
        for _ in range(200):
            world.append(1, bytes(300))
    assert await waits_leave_nothing(world.storage.writable)
    waiting = asyncio.create_task(world.storage.writable())
    await asyncio.sleep(0)
    world.store.gate.set()
    await asyncio.wait_for(waiting, 60)
    world.append(1, bytes(300))
    await world.storage.close(upload=True)
    await world.check()


async def test_for_room_in_the_wal_that_nobody_trims() -> None:
    wal = MemoryWal(small(max_bytes=10_000))
    await wal.reset(1 << 40)
    await wal.begin_epoch(1)
    with pytest.raises(WalFull):
        for number in range(100):
            wal.append(StreamAppend(1, 1, number, 1, [bytes(1000)]))
    assert await waits_leave_nothing(lambda: wal.writable(1000))
    await wal.close()


async def test_for_a_confirmation_without_a_quorum() -> None:
    confirm = ConfirmOffset()
    first = asyncio.create_task(confirm.wait(10))
    await asyncio.sleep(0)
    assert await waits_leave_nothing(lambda: confirm.wait(10))
    confirm.advance(10)
    await asyncio.wait_for(first, 60)
